// A map's pixels. The counterpart of captioning/views/maps.py: the same blur, scale and colors; the constants come
// from there with the data.

/** The bytes of base64 text. */
function bytes(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

/**
 * The cell nearest to a place along one axis.
 * @param place, offset and stride in one unit; offset is the first cell's center.
 */
function nearestCell(place, offset, stride, cells) {
  return Math.max(0, Math.min(cells - 1, Math.floor((place - offset) / stride + 0.5)));
}

/** How strongly a value is drawn, 0 to 1: the square root of its fraction of the scale's end. */
function strengthOf(value, end) {
  return Math.sqrt(Math.max(0, Math.min(value / end, 1)));
}

/** The least and the greatest of some values. */
function extremes(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

/** The error function, to 2e-7 (Abramowitz & Stegun, 7.1.26). */
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const sum = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t;
  return Math.sign(x) * (1 - sum * Math.exp(-x * x));
}

/**
 * The weights of cells at each pixel of an axis, (pixels x cells), row by row: a Gaussian's integral over each cell.
 * The view is mirrored at a border that a cell reaches: rows sum to 1, and to less near another border.
 * @param offset, stride in pixels.
 */
function gaussianWeights(cells, offset, stride, pixels, sigma) {
  const edge = (cell) => Math.max(0, Math.min(pixels, offset + (cell - 0.5) * stride));
  const weights = new Float32Array(pixels * cells);
  const [before, after] = [edge(0) < 1e-6, edge(cells) > pixels - 1e-6];
  for (let pixel = 0; pixel < pixels; pixel++) {
    const at = pixel + 0.5;
    for (const place of [at, ...(before ? [-at] : []), ...(after ? [2 * pixels - at] : [])]) {
      const below = (cell) => erf((edge(cell) - place) / (sigma * Math.SQRT2)) / 2;
      for (let cell = 0; cell < cells; cell++) weights[pixel * cells + cell] += below(cell + 1) - below(cell);
    }
  }
  return weights;
}

class AttentionMap {
  /** @param constants the "map" of the data. */
  constructor(constants) {
    this.constants = constants;
    this.colors = bytes(constants.colors); // (256 x 3)
    this.matrices = new Map();
  }

  #matrix(cells, offset, stride, pixels, longest) {
    const sigma = Math.min(longest, this.constants.sigmaOfCell * stride);
    const key = `${cells} ${offset} ${stride} ${pixels} ${sigma}`;
    if (!this.matrices.has(key)) this.matrices.set(key, gaussianWeights(cells, offset, stride, pixels, sigma));
    return this.matrices.get(key);
  }

  /**
   * (height x width) from the least to the greatest of alpha (rows x columns); the least is drawn where no cell is.
   * @param grid rows and columns of the cells, and their offset and stride in the view's sides.
   */
  smooth(alpha, grid, height, width) {
    const { rows, columns, offset, stride } = grid;
    const sigma = this.constants.sigmaOfSide * Math.min(height, width);
    const vertical = this.#matrix(rows, offset[0] * height, stride[0] * height, height, sigma);
    const horizontal = this.#matrix(columns, offset[1] * width, stride[1] * width, width, sigma);
    const [least] = extremes(alpha);
    const wide = new Float32Array(rows * width);
    for (let row = 0; row < rows; row++) {
      for (let x = 0; x < width; x++) {
        let sum = 0;
        for (let column = 0; column < columns; column++) {
          sum += horizontal[x * columns + column] * (alpha[row * columns + column] - least);
        }
        wide[row * width + x] = sum;
      }
    }
    const smooth = new Float32Array(height * width);
    for (let y = 0; y < height; y++) {
      for (let row = 0; row < rows; row++) {
        const share = vertical[y * rows + row];
        if (share === 0) continue;
        for (let x = 0; x < width; x++) smooth[y * width + x] += share * wide[row * width + x];
      }
    }
    const [low, high] = extremes(smooth);
    const stretch = (extremes(alpha)[1] - least) / Math.max(high - low, 1e-12);
    return smooth.map((value) => least + (value - low) * stretch);
  }

  /** (height x width) with every pixel the value of its cell, and the least value where no cell is. */
  cells(alpha, grid, height, width) {
    const { rows, columns, offset, stride } = grid;
    const [least] = extremes(alpha);
    const flat = new Float32Array(height * width).fill(least);
    const cellAt = (place, axis) => Math.floor((place - offset[axis]) / stride[axis] + 0.5);
    for (let y = 0; y < height; y++) {
      const row = cellAt((y + 0.5) / height, 0);
      if (row < 0 || row >= rows) continue;
      for (let x = 0; x < width; x++) {
        const column = cellAt((x + 0.5) / width, 1);
        if (column >= 0 && column < columns) flat[y * width + x] = alpha[row * columns + column];
      }
    }
    return flat;
  }

  /**
   * Pixels of the view (RGBA) with a map on them.
   * @param end the value that is drawn brightest.
   * @param opacity 0 leaves the view as it is, 1 gives the published figure.
   */
  painted(view, values, end, opacity) {
    const { colors } = this;
    const { style } = this.constants;
    const painted = new Uint8ClampedArray(view.length);
    for (let pixel = 0, at = 0; at < view.length; pixel++, at += 4) {
      const strength = strengthOf(values[pixel], end);
      const light = style.dim + (1 - style.dim) * strength;
      const share = style.opacity * strength;
      const color = 3 * (128 + Math.floor(strength * 127)); // the bright half: opacity makes weak ones faint
      for (let channel = 0; channel < 3; channel++) {
        const figure = light * view[at + channel] * (1 - share) + colors[color + channel] * share;
        painted[at + channel] = view[at + channel] * (1 - opacity) + figure * opacity;
      }
      painted[at + 3] = 255;
    }
    return painted;
  }

  /** RGBA pixels of values, in the map's colors alone. */
  colored(values, end) {
    const colored = new Uint8ClampedArray(4 * values.length);
    values.forEach((value, pixel) => {
      const color = 3 * Math.floor(strengthOf(value, end) * 255);
      colored.set([this.colors[color], this.colors[color + 1], this.colors[color + 2], 255], 4 * pixel);
    });
    return colored;
  }
}
