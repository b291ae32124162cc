// A map's pixels, with the blur, scale and colors of captioning/views/maps.py. The page's data has the constants.

/** The bytes of base64 text. */
function bytes(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

/**
 * The cell nearest to a position along one axis.
 * @param position, offset, stride in one unit; offset is the first cell's center.
 */
function nearestCell(position, offset, stride, cells) {
  return Math.max(0, Math.min(cells - 1, Math.floor((position - offset) / stride + 0.5)));
}

/** How strongly a value is drawn, 0 to 1: the square root of its fraction of the scale's maximum. */
function strengthOf(value, maximum) {
  return Math.sqrt(Math.max(0, Math.min(value / maximum, 1)));
}

/** The least and the greatest value. */
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
 * The weights of the cells at each pixel of an axis, (pixels x cells), row by row: a Gaussian's integral over each cell.
 * The view is mirrored at a border that a cell reaches, so that rows sum to 1. Near any other border they sum to less.
 * @param offset, stride in pixels.
 */
function gaussianWeights(cells, offset, stride, pixels, sigma) {
  const edge = (cell) => Math.max(0, Math.min(pixels, offset + (cell - 0.5) * stride));
  const weights = new Float32Array(pixels * cells);
  const [mirrorsFirst, mirrorsLast] = [edge(0) < 1e-6, edge(cells) > pixels - 1e-6];
  for (let pixel = 0; pixel < pixels; pixel++) {
    const center = pixel + 0.5;
    for (const mean of [center, ...(mirrorsFirst ? [-center] : []), ...(mirrorsLast ? [2 * pixels - center] : [])]) {
      const integral = (cell) => erf((edge(cell) - mean) / (sigma * Math.SQRT2)) / 2;
      for (let cell = 0; cell < cells; cell++) weights[pixel * cells + cell] += integral(cell + 1) - integral(cell);
    }
  }
  return weights;
}

class AttentionMap {
  /** @param constants the "map" of the data. */
  constructor(constants) {
    this.constants = constants;
    this.colors = bytes(constants.colors); // (256 x 3)
    this.cachedWeights = new Map();
  }

  #weights(cells, offset, stride, pixels, maximumSigma) {
    const sigma = Math.min(maximumSigma, this.constants.sigmaOfCell * stride);
    const key = `${cells} ${offset} ${stride} ${pixels} ${sigma}`;
    if (!this.cachedWeights.has(key)) this.cachedWeights.set(key, gaussianWeights(cells, offset, stride, pixels, sigma));
    return this.cachedWeights.get(key);
  }

  /**
   * The smooth map (height x width) of alpha (rows x columns), stretched to alpha's range; its least where no cell is.
   * @param grid rows and columns of the cells, and their offset and stride in fractions of the view's sides.
   */
  smooth(alpha, grid, height, width) {
    const { rows, columns, offset, stride } = grid;
    const sigma = this.constants.sigmaOfSide * Math.min(height, width);
    const vertical = this.#weights(rows, offset[0] * height, stride[0] * height, height, sigma);
    const horizontal = this.#weights(columns, offset[1] * width, stride[1] * width, width, sigma);
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
        const weight = vertical[y * rows + row];
        if (weight === 0) continue;
        for (let x = 0; x < width; x++) smooth[y * width + x] += weight * wide[row * width + x];
      }
    }
    const [low, high] = extremes(smooth);
    const stretch = (extremes(alpha)[1] - least) / Math.max(high - low, 1e-12);
    return smooth.map((value) => least + (value - low) * stretch);
  }

  /** The map (height x width) in which every pixel has the value of its cell; the least value where no cell is. */
  cells(alpha, grid, height, width) {
    const { rows, columns, offset, stride } = grid;
    const [least] = extremes(alpha);
    const values = new Float32Array(height * width).fill(least);
    const cellAt = (position, axis) => Math.floor((position - offset[axis]) / stride[axis] + 0.5);
    for (let y = 0; y < height; y++) {
      const row = cellAt((y + 0.5) / height, 0);
      if (row < 0 || row >= rows) continue;
      for (let x = 0; x < width; x++) {
        const column = cellAt((x + 0.5) / width, 1);
        if (column >= 0 && column < columns) values[y * width + x] = alpha[row * columns + column];
      }
    }
    return values;
  }

  /**
   * The pixels of the view (RGBA) with a map on them.
   * @param maximum the value that is drawn brightest.
   * @param opacity 0 leaves the view as it is, 1 gives the colors of Caption.figure.
   */
  paint(view, values, maximum, opacity) {
    const { colors } = this;
    const { style } = this.constants;
    const pixels = new Uint8ClampedArray(view.length);
    for (let pixel = 0, at = 0; at < view.length; pixel++, at += 4) {
      const strength = strengthOf(values[pixel], maximum);
      const light = style.dim + (1 - style.dim) * strength;
      const mapOpacity = style.opacity * strength;
      const color = 3 * (128 + Math.floor(strength * 127)); // the bright half: opacity makes weak ones faint
      for (let channel = 0; channel < 3; channel++) {
        const painted = light * view[at + channel] * (1 - mapOpacity) + colors[color + channel] * mapOpacity;
        pixels[at + channel] = view[at + channel] * (1 - opacity) + painted * opacity;
      }
      pixels[at + 3] = 255;
    }
    return pixels;
  }

  /** RGBA pixels of values, in the map's colors alone. */
  color(values, maximum) {
    const pixels = new Uint8ClampedArray(4 * values.length);
    values.forEach((value, pixel) => {
      const color = 3 * Math.floor(strengthOf(value, maximum) * 255);
      pixels.set([this.colors[color], this.colors[color + 1], this.colors[color + 2], 255], 4 * pixel);
    });
    return pixels;
  }
}
