// Browsers start no worker for pages that are opened from a disk, and the search runs in one. There
// it gets a hidden frame of the same page instead, which answers in the same way.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.ready = new Promise((resolve) => {
        frame.onload = () => {
          const inside = frame.contentWindow;
          inside.postMessage = (data) =>
            this.dispatchEvent(new MessageEvent("message", { data }));
          const script = frame.contentDocument.createElement("script");
          script.src = url;
          script.onload = () => resolve(inside);
          frame.contentDocument.body.append(script);
        };
        const begin = () => document.body.append(frame);
        document.body ? begin() : addEventListener("DOMContentLoaded", begin);
      });
    }

    postMessage(data) {
      this.ready.then((inside) =>
        inside.dispatchEvent(new inside.MessageEvent("message", { data })),
      );
    }
  };
  window.Worker = window.IFrameWorker;
}
