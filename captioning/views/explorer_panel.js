// One run's caption of an image. Text reaches the page as text nodes alone.

const UNSURE_BELOW = 0.15; // probability of a word

/** An element with attributes ("onclick" and the like are listeners; null and false are left out) and children. */
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function button(attributes, ...children) {
  return element("button", { type: "button", ...attributes }, ...children);
}

/** A number with this many digits after the point; a dash for null. */
function fixed(value, digits = 2) {
  return value === null ? "–" : Number(value).toFixed(digits).replace("-", "−");
}

/** A positive number with two significant digits, without an exponent. */
function significant(value) {
  return Number(value).toFixed(Math.max(2, 1 - Math.floor(Math.log10(value))));
}

/** The index in 0 .. count - 1 of a pointer along a side of an element that count equal cells divide. */
function indexAt(position, start, length, count) {
  return Math.max(0, Math.min(count - 1, Math.floor(((position - start) / length) * count)));
}

/** Whether a word is shown as unsure, because its probability is low; null is an unknown probability. */
function isUnsure(probability) {
  return probability !== null && probability < UNSURE_BELOW;
}

/** One run's caption of an image: pictures, words, the other captions of the beam, and the alignment matrix. */
class Panel {
  constructor(explorer, image, run) {
    this.explorer = explorer;
    this.image = image;
    this.run = run;
    this.locations = run.rows * run.columns;
    this.location = null; // the marked one
    this.state = explorer.stateOf(run);
    this.stages = [new Stage(this), new Stage(this)]; // the first is shown only while two words are pinned
    this.stageBox = element("div", { class: "stages" }, this.stages[1].root);
    this.words = element("div", {
      class: "words",
      role: "toolbar",
      "aria-label": `Words of the caption by ${run.run}`,
      onpointerover: (event) => this.#overWord(event),
      onpointerleave: () => this.returnToPin(),
      onfocusin: (event) => this.#overWord(event),
      onclick: (event) => this.#clickWord(event),
    });
    this.details = element("p", { class: "details" });
    this.beam = element("ol", { class: "beam", "aria-label": `Captions of ${run.run}` });
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
    this.rowMarks = this.stages.map(() => element("div", { class: "mark row" }));
    this.columnMark = element("div", { class: "mark column", hidden: true });
    const numbers = Object.entries(run.numbers).map(([name, value]) =>
      element(
        "span",
        { class: "number" },
        `${name} `,
        element("b", {}, typeof value === "string" ? value : fixed(value, 3)),
      ),
    );
    this.root = element(
      "article",
      {
        class: "panel",
        "data-run": run.run,
        onpointerenter: () => explorer.activate(this),
        onfocusin: () => explorer.activate(this),
      },
      element("h3", { title: run.run }, run.run),
      element(
        "div",
        { class: "body" },
        this.stageBox,
        element(
          "div",
          { class: "reading" },
          this.words,
          this.details,
          element("div", { class: "numbers" }, ...numbers),
          element("h4", {}, "Captions, with log-probabilities, length-normalized as in the search"),
          this.beam,
          element(
            "details",
            {
              class: "matrix-box",
              open: explorer.matrixOpen,
              ontoggle: (event) => (explorer.matrixOpen = event.target.open),
            },
            element("summary", {}, "Matrix of words (rows) and locations (columns)"),
            element(
              "div",
              { class: "alignment" },
              this.labels,
              element(
                "div",
                { class: "grid" },
                this.matrix,
                element("div", { class: "lines" }),
                ...this.rowMarks,
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
      ),
    );
    this.#fillBeam();
    this.showCaption(this.state.caption, { ...this.state, lead: false });
  }

  get caption() {
    return this.run.captions[this.state.caption];
  }

  /** The kind of attention shown: the requested one, if the caption has it. */
  get kind() {
    return this.explorer.attention in this.caption.attention ? this.explorer.attention : "alphas";
  }

  /** The attention shown: levels (T x L) as bytes, decoded once, in 255ths of each word's peak. */
  get shownAttention() {
    const attention = this.caption.attention[this.kind];
    attention.decoded ??= bytes(attention.levels);
    return attention;
  }

  /** The attention of one word over the locations, (L). */
  distribution(step) {
    const { decoded, peaks } = this.shownAttention;
    const levels = decoded.subarray(step * this.locations, (step + 1) * this.locations);
    return Float32Array.from(levels, (level) => (level * peaks[step]) / 255);
  }

  /** The probability of a word; null if it is not known. */
  #probability(step) {
    const logProb = this.caption.logProbs?.[step] ?? null;
    return logProb === null ? null : Math.exp(logProb);
  }

  /** The maximum of the scale of all maps of the caption: the greatest attention at any word. */
  get scaleMaximum() {
    return Math.max(...this.shownAttention.peaks) || 1;
  }

  #fillBeam() {
    const isOnlyCaption = this.run.captions.length === 1;
    this.beam.hidden = isOnlyCaption;
    this.beam.previousSibling.hidden = isOnlyCaption;
    this.beam.replaceChildren(
      ...this.run.captions.map((caption, rank) =>
        element(
          "li",
          {},
          button(
            { class: "hypothesis", "data-rank": rank, onclick: () => this.showCaption(rank) },
            element("span", {}, caption.words.join(" ") || "(no words)"),
            element("span", { class: "log-prob" }, caption.logProb === null ? "" : fixed(caption.logProb)),
          ),
        ),
      ),
    );
  }

  /**
   * Show another caption of the beam.
   * @param word, pins the word to show and the pinned words; by default the word that the run starts at, and no pins.
   * @param lead whether the other runs follow to the same word.
   */
  showCaption(rank, { word = this.run.start, pins = [], lead = true } = {}) {
    const hadFocus = this.words.contains(document.activeElement);
    Object.assign(this.state, { caption: rank, word, pins });
    const { words } = this.caption;
    const probabilities = words.map((_, step) => this.#probability(step));
    this.beam.querySelectorAll(".hypothesis").forEach((item, k) => item.setAttribute("aria-pressed", String(k === rank)));
    this.words.replaceChildren(
      ...words.map((text, step) =>
        button(
          {
            class: isUnsure(probabilities[step]) ? "word unsure" : "word",
            "data-step": step,
            tabindex: "-1",
            title: probabilities[step] === null ? null : `probability ${fixed(probabilities[step])}`,
          },
          element("span", { class: "text" }, text),
          isUnsure(probabilities[step]) ? element("span", { class: "spoken" }, " (unsure)") : null,
          probabilities[step] === null
            ? null
            : element(
                "span",
                { class: "probability" },
                element("span", { style: `width:${100 * probabilities[step]}%` }),
              ),
        ),
      ),
    );
    this.labels.replaceChildren(...words.map((text) => element("span", {}, text)));
    const alignment = this.root.querySelector(".alignment");
    alignment.style.setProperty("--words", words.length);
    alignment.style.setProperty("--rows", this.run.rows);
    this.show(Math.min(word, words.length - 1), { lead });
    this.#drawMatrix();
    if (hadFocus) this.focusWord();
  }

  /** Show the attention of one word; the other runs follow to the same word of their captions if this one leads. */
  show(word, { lead = true } = {}) {
    this.state.word = Math.max(0, word);
    this.words.querySelectorAll(".word").forEach((item, step) => {
      const isShown = step === this.state.word;
      item.setAttribute("aria-pressed", String(this.state.pins.includes(step)));
      if (isShown) item.setAttribute("aria-current", "true");
      else item.removeAttribute("aria-current");
      item.tabIndex = isShown ? 0 : -1;
    });
    [...this.labels.children].forEach((label, step) => label.classList.toggle("shown", step === this.state.word));
    this.draw();
    this.#describe();
    if (lead) this.explorer.follow(this);
  }

  move(steps) {
    const last = this.caption.words.length - 1;
    const hadFocus = this.words.contains(document.activeElement);
    this.show(Math.max(0, Math.min(last, this.state.word + steps)));
    if (hadFocus) this.focusWord();
  }

  /** Pin the word that is shown, or release it if it is pinned. A third pin replaces the first. */
  pin() {
    const { state } = this;
    if (this.caption.words.length === 0) return;
    if (state.pins.includes(state.word)) state.pins = state.pins.filter((step) => step !== state.word);
    else state.pins = [...state.pins.slice(-1), state.word];
    this.show(state.word);
  }

  unpin() {
    this.state.pins = [];
    this.show(this.state.word);
  }

  /** Back to the word that was pinned last, if one is. */
  returnToPin() {
    const { pins, word } = this.state;
    if (pins.length && !pins.includes(word)) this.show(pins[pins.length - 1]);
  }

  focusWord() {
    this.words.children[this.state.word]?.focus({ preventScroll: true });
  }

  /** The words in the pictures: the shown one, and the other pinned one if two are pinned. */
  get #pictured() {
    const { word, pins } = this.state;
    if (this.caption.words.length === 0) return [null, null];
    return [pins.length < 2 ? null : pins[pins[0] === word ? 1 : 0], word];
  }

  draw() {
    const pictured = this.#pictured;
    const [first, second] = this.stages;
    const isPair = pictured[0] !== null;
    if (isPair !== this.stageBox.contains(first.root)) {
      // Two pictures are lower than one. The box keeps its height, so that the words stay under a mouse pointer.
      const keepsHeight = isPair && matchMedia("(hover: hover)").matches;
      this.stageBox.style.minHeight = keepsHeight ? `${this.stageBox.getBoundingClientRect().height}px` : "";
      if (isPair) second.root.before(first.root);
      else first.root.remove();
      this.stageBox.classList.toggle("pair", isPair);
    }
    if (isPair) first.draw(pictured[0]);
    second.draw(pictured[1]);
    this.rowMarks.forEach((mark, k) => {
      mark.hidden = pictured[k] === null;
      mark.style.setProperty("--row", pictured[k] ?? 0);
    });
  }

  /** Draw again after another kind of attention was chosen. */
  redraw() {
    this.draw();
    this.#drawMatrix();
    this.mark(this.location);
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
    const context = this.matrix.getContext("2d");
    for (let step = 0; step < steps; step++) {
      const chosen = this.caption.chosen[step];
      const pixels = map.color(this.distribution(step), this.scaleMaximum);
      if (chosen !== null) pixels.fill(255, 4 * chosen, 4 * chosen + 4);
      context.putImageData(new ImageData(pixels, this.locations, 1), 0, step);
    }
  }

  /** Mark a location in pictures and matrix, and shade the words by their attention to it; null removes the mark. */
  mark(location) {
    this.location = location;
    this.stages.forEach((stage) => stage.mark(location));
    this.columnMark.hidden = location === null;
    if (location !== null) {
      this.columnMark.style.left = `${(100 * location) / this.locations}%`;
      this.columnMark.style.width = `${100 / this.locations}%`;
    }
    this.words.classList.toggle("by-location", location !== null);
    this.words.querySelectorAll(".word").forEach((item, step) => {
      const fraction = location === null ? 0 : this.shownAttention.decoded[step * this.locations + location] / 255;
      item.style.setProperty("--fraction", fraction.toFixed(3));
    });
    this.#describe(location);
  }

  #describe(location = null) {
    const { words, betas, chosen } = this.caption;
    const step = this.state.word;
    if (words.length === 0) {
      this.details.textContent = "This caption has no words.";
      return;
    }
    const { columns } = this.run;
    const cellName = (cell) => `row ${Math.floor(cell / columns) + 1}, column ${(cell % columns) + 1}`;
    const attention = this.distribution(step);
    const symbol = this.kind === "alphas" ? "α" : this.kind;
    const sum = attention.reduce((partialSum, value) => partialSum + value, 0) || 1;
    const fractions = attention.map((value) => value / sum);
    const entropy = fractions.reduce((nats, p) => (p > 0 ? nats - p * Math.log(p) : nats), 0);
    const strongest = attention.indexOf(attention.reduce((most, value) => Math.max(most, value), 0));
    const facts = [`“${words[step]}”, word ${step + 1} of ${words.length}`];
    if (this.state.pins.includes(step)) facts.push("pinned");
    const probability = this.#probability(step);
    if (probability !== null) facts.push(`probability ${fixed(probability)}`);
    if (betas !== null) facts.push(`weight of the image (β) ${fixed(betas[step])}`);
    if (location !== null) facts.push(`${symbol} ${fixed(attention[location], 4)} in ${cellName(location)}`);
    else if (chosen[step] !== null) facts.push(`chose ${cellName(chosen[step])}, α ${fixed(attention[chosen[step]], 3)}`);
    else if (attention[strongest] * this.locations < this.explorer.map.constants.nearlyEven) facts.push("nearly even");
    else facts.push(`strongest in ${cellName(strongest)}`);
    facts.push(`spread over ${Math.round(Math.exp(entropy))} of ${this.locations} cells`);
    if (![this.kind, this.explorer.kinds[0]].includes(this.explorer.attention)) facts.push(`has no ${this.explorer.attention}`);
    this.details.textContent = facts.join(" · ");
    if (this.explorer.active === this) this.explorer.announce(`${this.run.run}: ${this.details.textContent}`);
  }

  #showStep(step) {
    if (step !== this.state.word) this.show(step);
  }

  #overWord(event) {
    const word = event.target.closest(".word");
    if (word) this.#showStep(Number(word.dataset.step));
  }

  #clickWord(event) {
    const word = event.target.closest(".word");
    if (!word) return;
    this.#showStep(Number(word.dataset.step));
    this.pin();
    this.focusWord(); // some browsers give a clicked button no focus
  }

  #pointAtMatrix(event) {
    if (this.caption.words.length === 0) return;
    const box = this.matrix.getBoundingClientRect();
    this.#showStep(indexAt(event.clientY, box.top, box.height, this.caption.words.length));
    this.explorer.markLocation(this, indexAt(event.clientX, box.left, box.width, this.locations));
  }

  leaveLocation(event) {
    if (event.pointerType !== "touch") this.explorer.markLocation(this, null); // a lifted finger keeps the mark
  }

  #leaveMatrix(event) {
    this.leaveLocation(event);
    this.returnToPin();
  }

  #matrixKey(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (event.key === "Enter") this.pin();
    else if (event.key in moves && !event.altKey && !event.ctrlKey && !event.metaKey) {
      const [words, locations] = moves[event.key];
      this.move(words);
      const location = (this.location ?? 0) + locations;
      this.explorer.markLocation(this, Math.max(0, Math.min(this.locations - 1, location)));
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

