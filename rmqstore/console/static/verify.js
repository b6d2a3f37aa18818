// Updates the verify page during a run.  Without JavaScript the page reloads itself.
"use strict";

(() => {
  const run = document.getElementById("run");
  if (!run) {
    return;
  }
  const kept = "rmqstore-verify-focus";
  if (window.sessionStorage.getItem(kept)) {
    // Keep the focus on the button after a reload.
    window.sessionStorage.removeItem(kept);
    run.querySelector("button")?.focus();
  }
  if (run.dataset.state !== "running") {
    return;
  }
  const size = (number) => {
    let value = number;
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (value < 1024) {
        return (unit === "B" ? String(value) : value.toFixed(1)) + " " + unit;
      }
      value /= 1024;
    }
    return value.toFixed(1) + " TiB";
  };
  const show = (id, text) => {
    const element = document.getElementById(id);
    if (element && element.textContent !== text) {
      element.textContent = text;
    }
  };
  let misses = 0;
  const look = async () => {
    try {
      const response = await fetch(run.dataset.status + "?max_num=1", { cache: "no-store" });
      if (!response.ok) {
        throw new Error(String(response.status));
      }
      const status = await response.json();
      misses = 0;
      if (status.state !== "running") {
        if (run.contains(document.activeElement)) {
          window.sessionStorage.setItem(kept, "1");
        }
        window.location.reload();
        return;
      }
      const bar = document.getElementById("run-bar");
      if (bar && status.total > 0) {
        bar.value = (100 * status.done) / status.total;
      }
      let text = size(status.done) + " of " + size(status.total);
      if (status.bytes_per_second) {
        text += ", " + size(status.bytes_per_second) + "/s";
      }
      if (status.seconds_left !== null) {
        text += ", " + Math.ceil(status.seconds_left) + " s left";
      }
      show("run-text", text);
      show("run-number", String(status.number));
    } catch {
      misses += 1;
      if (misses > 10) {
        show("run-state", "the server does not respond");
        return;
      }
    }
    window.setTimeout(look, 1000);
  };
  window.setTimeout(look, 300);
})();
