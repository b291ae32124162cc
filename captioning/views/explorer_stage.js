// A picture with the attention at one word on it, and the scale of the attention.

/** One picture of a panel. Two pictures stand side by side while two words are pinned. */
class Stage {
  constructor(panel) {
    this.panel = panel;
    this.step = null;
    this.canvas = element("canvas", { role: "img" });
    this.chosenFrame = element("div", { class: "frame chosen", hidden: true });
    this.markedFrame = element("div", { class: "frame marked", hidden: true });
    this.picture = element(
      "div",
      {
        class: "stage",
        onpointermove: (event) => this.#point(event),
        onpointerdown: (event) => this.#point(event),
        onpointerleave: (event) => panel.leaveLocation(event),
      },
      this.canvas,
      this.chosenFrame,
      this.markedFrame,
    );
    this.title = element("figcaption", {});
    this.colors = element("canvas", { class: "colors", width: 256, height: 1, "aria-hidden": "true" });
    this.even = element("i", { class: "even", title: "even attention" });
    this.maximum = element("span", { class: "maximum" });
    this.scale = element(
      "div",
      { class: "scale", title: "Scale of this caption's maps: attention per location" },
      element("span", {}, "0"),
      element("div", { class: "bar" }, this.colors, this.even),
      this.maximum,
    );
    this.root = element("figure", { class: "word-view" }, this.title, this.picture, this.scale);
  }

  /** Draw the attention of a word of the caption; null draws the view alone. */
  draw(step) {
    this.step = step;
    const { panel } = this;
    const { image, run } = panel;
    const { map, style, opacity } = panel.explorer;
    const word = step === null ? undefined : panel.caption.words[step];
    this.title.textContent = word === undefined ? "" : `“${word}”`;
    this.scale.hidden = word === undefined;
    if (!image.pixels) return; // the picture is still being decoded; Explorer.open draws it then
    const { width, height, pixels } = image;
    this.canvas.width = width;
    this.canvas.height = height;
    this.root.style.setProperty("--aspect", width / height);
    const context = this.canvas.getContext("2d", { willReadFrequently: true }); // draws pixels alone, which needs no GPU
    const chosen = word === undefined ? null : panel.caption.chosen[step];
    if (word === undefined) {
      context.putImageData(pixels, 0, 0);
    } else {
      const values = map[style](panel.distribution(step), run, height, width);
      const maximum = panel.scaleMaximum;
      context.putImageData(new ImageData(map.paint(pixels.data, values, maximum, opacity), width, height), 0, 0);
      this.#drawScale(maximum);
    }
    this.#frame(this.chosenFrame, chosen);
    this.canvas.setAttribute(
      "aria-label",
      word === undefined ? image.name : `${image.name}: attention of ${run.run} at “${word}”`,
    );
  }

  /** Frame a location; null removes the frame. */
  mark(location) {
    this.#frame(this.markedFrame, location);
  }

  #drawScale(maximum) {
    const { map } = this.panel.explorer;
    const ramp = Float32Array.from({ length: 256 }, (_, level) => level / 255);
    const white = new Uint8ClampedArray(4 * 256).fill(255);
    this.colors.getContext("2d").putImageData(new ImageData(map.paint(white, ramp, 1, 1), 256, 1), 0, 0);
    this.even.style.left = `${100 / this.panel.locations / maximum}%`;
    this.maximum.textContent = significant(maximum);
  }

  #frame(frame, location) {
    frame.hidden = location === null;
    if (location === null) return;
    const { columns, offset, stride } = this.panel.run;
    const edgesOf = (cell, axis) => {
      const center = offset[axis] + cell * stride[axis];
      const edges = [center - stride[axis] / 2, center + stride[axis] / 2];
      return edges.map((edge) => 100 * Math.max(0, Math.min(1, edge))); // percent of the view, inside it
    };
    const [top, bottom] = edgesOf(Math.floor(location / columns), 0);
    const [left, right] = edgesOf(location % columns, 1);
    frame.style.left = `${left}%`;
    frame.style.top = `${top}%`;
    frame.style.width = `${right - left}%`;
    frame.style.height = `${bottom - top}%`;
    frame.dataset.location = location;
  }

  #point(event) {
    const box = this.picture.getBoundingClientRect();
    const { rows, columns, offset, stride } = this.panel.run;
    const row = nearestCell((event.clientY - box.top) / box.height, offset[0], stride[0], rows);
    const column = nearestCell((event.clientX - box.left) / box.width, offset[1], stride[1], columns);
    this.panel.explorer.markLocation(this.panel, row * columns + column);
  }
}
