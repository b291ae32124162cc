// A page opened from a file may start no worker, and the search is one. Here the worker's script runs in a hidden frame.
// The address of this file must contain "iframe-worker": the theme's offline plugin then adds no script from elsewhere.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const scope = this.frame.contentWindow;
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
      this.ready = new Promise((resolve, reject) => {
        const script = scope.document.createElement("script");
        script.src = address;
        script.onload = resolve;
        script.onerror = reject;
        scope.document.body.append(script);
      });
    }

    postMessage(data) {
      const scope = this.frame.contentWindow;
      this.ready.then(() => scope.dispatchEvent(new scope.MessageEvent("message", { data: structuredClone(data) })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
