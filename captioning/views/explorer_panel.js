// One run's caption of an image. Text reaches the page as text nodes alone.

/** An element with attributes ("onclick" and the like are listeners; null and false are left out) and children. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function button(attributes, ...children) {
  return element("button", { type: "button", ...attributes }, ...children);
}

/** A number with so many digits after the point; a dash where there is none. */
function short(value, digits = 2) {
  return value === null ? "–" : Number(value).toFixed(digits).replace("-", "−");
}

/** The index in 0..count-1 of a pointer along one side of an element. */
function along(position, start, length, count) {
  return Math.max(0, Math.min(count - 1, Math.floor(((position - start) / length) * count)));
}

/** One run's caption of the image shown: picture, words, other captions of its beam, alignment matrix. */
class Panel {
  constructor(explorer, image, look) {
    this.explorer = explorer;
    this.image = image;
    this.look = look;
    this.locations = look.rows * look.columns;
    this.place = explorer.placeOf(look);
    this.canvas = element("canvas", { role: "img" });
    this.chosenFrame = element("div", { class: "frame chosen", hidden: true });
    this.hereFrame = element("div", { class: "frame here", hidden: true });
    this.stage = element(
      "div",
      {
        class: "stage",
        onpointermove: (event) => this.#pointAtPicture(event),
        onpointerdown: (event) => this.#pointAtPicture(event),
        onpointerleave: (event) => this.#leaveLocation(event),
      },
      this.canvas,
      this.chosenFrame,
      this.hereFrame,
    );
    this.words = element("div", {
      class: "words",
      role: "toolbar",
      "aria-label": `Words of the caption by ${look.run}`,
      onpointerover: (event) => this.#overWord(event),
      onpointerleave: () => this.rest(),
      onfocusin: (event) => this.#overWord(event),
      onclick: (event) => this.#clickWord(event),
    });
    this.details = element("p", { class: "details" });
    this.beam = element("ol", { class: "beam", "aria-label": `Captions of the beam of ${look.run}, best first` });
    this.labels = element("div", { class: "labels", "aria-hidden": "true" });
    this.matrix = element("canvas", {
      class: "matrix",
      role: "img",
      tabindex: "0",
      onkeydown: (event) => this.#matrixKey(event),
      onpointermove: (event) => this.#pointAtMatrix(event),
      onpointerdown: (event) => this.#pointAtMatrix(event),
      onpointerleave: (event) => this.#leaveMatrix(event),
      onclick: () => this.pin(),
    });
    this.rowMark = element("div", { class: "mark row" });
    this.columnMark = element("div", { class: "mark column", hidden: true });
    const numbers = Object.entries(look.numbers).map(([name, value]) =>
      element(
        "span",
        { class: "number" },
        `${name} `,
        element("b", {}, typeof value === "string" ? value : short(value, 3)),
      ),
    );
    this.root = element(
      "article",
      {
        class: "panel",
        "data-run": look.run,
        onpointerenter: () => explorer.activate(this),
        onfocusin: () => explorer.activate(this),
      },
      element("h3", { title: look.run }, look.run),
      element(
        "div",
        { class: "body" },
        this.stage,
        element(
          "div",
          { class: "reading" },
          this.words,
          this.details,
          element("div", { class: "numbers" }, ...numbers),
          element("h4", {}, "Beam, with scores"),
          this.beam,
          element("h4", {}, "Words × locations"),
          element(
            "div",
            { class: "alignment" },
            this.labels,
            element(
              "div",
              { class: "grid" },
              this.matrix,
              element("div", { class: "lines" }),
              this.rowMark,
              this.columnMark,
            ),
            element(
              "div",
              { class: "axis", "aria-hidden": "true" },
              element("span", {}, "top of the image"),
              element("span", {}, "bottom"),
            ),
          ),
        ),
      ),
    );
    this.#fillBeam();
    this.showCaption(this.place.caption, { ...this.place, lead: false });
  }

  get caption() {
    return this.look.captions[this.place.caption];
  }

  /** (T x L) as bytes, decoded once. */
  get levels() {
    return (this.caption.decoded ??= bytes(this.caption.levels));
  }

  /** Alphas of one word, (L). */
  alphas(word) {
    const peak = this.caption.peaks[word] / 255;
    const levels = this.levels.subarray(word * this.locations, (word + 1) * this.locations);
    return Float32Array.from(levels, (level) => level * peak);
  }

  #fillBeam() {
    const alone = this.look.captions.length === 1;
    this.beam.hidden = alone;
    this.beam.previousSibling.hidden = alone;
    this.beam.replaceChildren(
      ...this.look.captions.map((caption, rank) =>
        element(
          "li",
          {},
          button(
            { class: "told", "data-rank": rank, onclick: () => this.showCaption(rank) },
            element("span", {}, caption.words.join(" ") || "(no words)"),
            element("span", { class: "score" }, caption.score === null ? "" : short(caption.score)),
          ),
        ),
      ),
    );
  }

  /** Show another caption of the beam, from its first word unless told where it was left. */
  showCaption(rank, { word = 0, pinned = null, lead = true } = {}) {
    Object.assign(this.place, { caption: rank, word, pinned });
    const { words, betas } = this.caption;
    this.beam.querySelectorAll(".told").forEach((told, k) => told.setAttribute("aria-pressed", String(k === rank)));
    this.words.replaceChildren(
      ...words.map((text, step) =>
        button(
          { class: "word", "data-step": step, tabindex: "-1" },
          element("span", { class: "text" }, text),
          betas === null
            ? null
            : element(
                "span",
                { class: "gate", title: `β ${short(betas[step])}` },
                element("span", { style: `width:${100 * (betas[step] ?? 0)}%` }),
              ),
        ),
      ),
    );
    this.labels.replaceChildren(...words.map((text) => element("span", {}, text)));
    const alignment = this.root.querySelector(".alignment");
    alignment.style.setProperty("--words", words.length);
    alignment.style.setProperty("--rows", this.look.rows);
    this.#drawMatrix();
    this.show(Math.min(word, words.length - 1), { lead });
  }

  /** Show where one word looked; the other runs follow to their own such word. */
  show(word, { lead = true } = {}) {
    this.place.word = Math.max(0, word);
    this.words.querySelectorAll(".word").forEach((item, step) => {
      const shown = step === this.place.word;
      item.setAttribute("aria-pressed", String(step === this.place.pinned));
      if (shown) item.setAttribute("aria-current", "true");
      else item.removeAttribute("aria-current");
      item.tabIndex = shown ? 0 : -1;
    });
    [...this.labels.children].forEach((label, step) => label.classList.toggle("shown", step === this.place.word));
    this.rowMark.style.setProperty("--row", this.place.word);
    this.rowMark.hidden = this.caption.words.length === 0;
    this.draw();
    this.#describe();
    if (lead) this.explorer.follow(this);
  }

  move(steps) {
    const last = this.caption.words.length - 1;
    this.show(Math.max(0, Math.min(last, this.place.word + steps)));
    if (this.words.contains(document.activeElement)) this.words.children[this.place.word]?.focus();
  }

  /** Hold the word that is shown, or let it go when it is held already. */
  pin() {
    if (this.caption.words.length === 0) return;
    this.place.pinned = this.place.pinned === this.place.word ? null : this.place.word;
    this.show(this.place.word);
  }

  unpin() {
    this.place.pinned = null;
    this.show(this.place.word);
  }

  /** Back to the word that is held, if one is. */
  rest() {
    if (this.place.pinned !== null && this.place.pinned !== this.place.word) this.show(this.place.pinned);
  }

  draw() {
    const { width, height, pixels } = this.image;
    if (!pixels) return; // the picture is still being decoded, and draws when it is there
    const { map, style, opacity } = this.explorer;
    const word = this.caption.words[this.place.word];
    this.canvas.width = width;
    this.canvas.height = height;
    this.stage.style.setProperty("--aspect", width / height);
    const drawing = this.canvas.getContext("2d", { willReadFrequently: true }); // made of pixels: no work for a GPU
    const chosen = word === undefined ? null : this.caption.chosen[this.place.word];
    if (word === undefined) {
      drawing.putImageData(pixels, 0, 0);
    } else {
      const alpha = this.alphas(this.place.word);
      const spread = map[style](alpha, this.look, height, width);
      const strength = map.strengths(spread, this.locations, chosen !== null);
      drawing.putImageData(new ImageData(map.lit(pixels.data, strength, opacity), width, height), 0, 0);
    }
    this.#frame(this.chosenFrame, chosen);
    this.canvas.setAttribute(
      "aria-label",
      word === undefined ? this.image.name : `${this.image.name}: where ${this.look.run} looked at “${word}”`,
    );
  }

  #frame(frame, location) {
    frame.hidden = location === null;
    if (location === null) return;
    const { columns, offset, stride } = this.look;
    const side = (cell, axis) => {
      const centre = offset[axis] + cell * stride[axis];
      const [start, end] = [centre - stride[axis] / 2, centre + stride[axis] / 2];
      return [start, end].map((edge) => 100 * Math.max(0, Math.min(1, edge))); // inside the view
    };
    const [top, bottom] = side(Math.floor(location / columns), 0);
    const [left, right] = side(location % columns, 1);
    frame.style.left = `${left}%`;
    frame.style.top = `${top}%`;
    frame.style.width = `${right - left}%`;
    frame.style.height = `${bottom - top}%`;
    frame.dataset.location = location;
  }

  #drawMatrix() {
    const { map } = this.explorer;
    const steps = this.caption.words.length;
    this.matrix.width = this.locations;
    this.matrix.height = Math.max(1, steps);
    this.matrix.setAttribute(
      "aria-label",
      `Alignment of ${steps} words with ${this.locations} locations, the image's rows one after the other`,
    );
    const drawing = this.matrix.getContext("2d");
    for (let step = 0; step < steps; step++) {
      const chosen = this.caption.chosen[step];
      const colored = map.colored(map.strengths(this.alphas(step), this.locations, chosen !== null));
      if (chosen !== null) colored.fill(255, 4 * chosen, 4 * chosen + 4);
      drawing.putImageData(new ImageData(colored, this.locations, 1), 0, step);
    }
  }

  /** Mark a location in picture and matrix, and shade the words by how much they looked there; null ends that. */
  mark(location) {
    this.#frame(this.hereFrame, location);
    this.columnMark.hidden = location === null;
    if (location !== null) {
      this.columnMark.style.left = `${(100 * location) / this.locations}%`;
      this.columnMark.style.width = `${100 / this.locations}%`;
    }
    this.words.classList.toggle("by-location", location !== null);
    this.words.querySelectorAll(".word").forEach((item, step) => {
      const share = location === null ? 0 : this.levels[step * this.locations + location] / 255;
      item.style.setProperty("--here", share.toFixed(3));
    });
    this.#describe(location);
  }

  #describe(location = null) {
    const { words, betas, logProbs, chosen } = this.caption;
    const step = this.place.word;
    if (words.length === 0) {
      this.details.textContent = "This caption has no words.";
      return;
    }
    const { columns } = this.look;
    const where = (cell) => `row ${Math.floor(cell / columns) + 1}, column ${(cell % columns) + 1}`;
    const alpha = this.alphas(step);
    const total = alpha.reduce((sum, value) => sum + value, 0) || 1;
    const shares = alpha.map((value) => value / total);
    const entropy = shares.reduce((sum, share) => (share > 0 ? sum - share * Math.log(share) : sum), 0);
    const strongest = alpha.indexOf(alpha.reduce((most, value) => Math.max(most, value), 0));
    const parts = [`“${words[step]}”, word ${step + 1} of ${words.length}`];
    if (this.place.pinned === step) parts.push("pinned");
    if (logProbs !== null && logProbs[step] !== null) parts.push(`probability ${short(Math.exp(logProbs[step]))}`);
    if (betas !== null) parts.push(`β ${short(betas[step])}`);
    if (location !== null) parts.push(`α ${short(alpha[location], 4)} in ${where(location)}`);
    else if (chosen[step] !== null) parts.push(`chose ${where(chosen[step])}, α ${short(alpha[chosen[step]], 3)}`);
    else parts.push(`strongest in ${where(strongest)}`);
    parts.push(`spread over ${Math.round(Math.exp(entropy))} of ${this.locations} cells`);
    this.details.textContent = parts.join(" · ");
    if (this.explorer.active === this) this.explorer.say(`${this.look.run}: ${this.details.textContent}`);
  }

  #lookAt(step) {
    if (step !== this.place.word) this.show(step);
  }

  #overWord(event) {
    const word = event.target.closest(".word");
    if (word) this.#lookAt(Number(word.dataset.step));
  }

  #clickWord(event) {
    const word = event.target.closest(".word");
    if (!word) return;
    this.#lookAt(Number(word.dataset.step));
    this.pin();
  }

  #pointAtPicture(event) {
    const box = this.stage.getBoundingClientRect();
    const { rows, columns, offset, stride } = this.look;
    const row = nearestCell((event.clientY - box.top) / box.height, offset[0], stride[0], rows);
    const column = nearestCell((event.clientX - box.left) / box.width, offset[1], stride[1], columns);
    this.explorer.locate(this, row * columns + column);
  }

  #pointAtMatrix(event) {
    if (this.caption.words.length === 0) return;
    const box = this.matrix.getBoundingClientRect();
    this.#lookAt(along(event.clientY, box.top, box.height, this.caption.words.length));
    this.explorer.locate(this, along(event.clientX, box.left, box.width, this.locations));
  }

  #leaveLocation(event) {
    if (event.pointerType !== "touch") this.explorer.locate(this, null); // a finger that lifts has not lost interest
  }

  #leaveMatrix(event) {
    this.#leaveLocation(event);
    this.rest();
  }

  #matrixKey(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (event.key === "Enter") this.pin();
    else if (event.key in moves && !event.altKey && !event.ctrlKey && !event.metaKey) {
      const [words, locations] = moves[event.key];
      this.move(words);
      const location = (this.explorer.location ?? 0) + locations;
      this.explorer.locate(this, Math.max(0, Math.min(this.locations - 1, location)));
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

