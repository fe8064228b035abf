// The page is whole without this: it only filters the lines of the logs.
"use strict";
(() => {
  const input = document.getElementById("filter");
  if (!input) return;
  input.closest("p").hidden = false;
  const said = document.getElementById("filtered");
  const logs = [...document.querySelectorAll("details.log-of")].map((log) => ({
    log, lines: [...log.querySelectorAll(".l")], gaps: [...log.querySelectorAll(".gap")], open: log.open,
  }));
  for (const { log } of logs) {
    log.addEventListener("toggle", () => {
      const error = log.querySelector(".e");
      if (log.open && error) error.parentElement.scrollTop = error.offsetTop - error.parentElement.offsetTop - 160;
    });
  }
  let waiting = 0;
  const apply = () => {
    const wanted = input.value.toLowerCase();
    let all = 0;
    for (const { log, lines, gaps, open } of logs) {
      let shown = 0;
      for (const line of lines) {
        const good = !wanted || line.textContent.toLowerCase().includes(wanted);
        line.hidden = !good;
        if (good) shown += 1;
      }
      for (const gap of gaps) gap.hidden = wanted !== "";
      log.hidden = wanted !== "" && shown === 0;
      log.open = wanted ? shown > 0 : open;
      all += shown;
    }
    said.textContent = wanted ? ` ${all} of the lines shown here` : "";
  };
  input.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(apply, 120);
  });
})();
