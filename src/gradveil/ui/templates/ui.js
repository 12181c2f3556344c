"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const themes = ["auto", "light", "dark"];
  let theme = "auto";
  $("theme").addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    $("theme").querySelector("span").textContent = theme[0].toUpperCase() + theme.slice(1);
    $("theme").setAttribute("aria-label", `Colour scheme: ${theme === "auto" ? "automatic" : theme}`);
  });

  const percent = (v) => `${(100 * v).toFixed(0)} %`;
  const noise = () => 10 ** Number($("noise").value);
  const shown = {
    top: () => percent($("top").value), bottom: () => percent($("bottom").value),
    noise: () => Number(noise().toPrecision(2)), rounds: () => $("rounds").value, steps: () => $("steps").value,
  };
  const refresh = () => {
    for (const [id, text] of Object.entries(shown)) document.querySelector(`output[for="${id}"]`).textContent = text();
    document.querySelectorAll(".slider[data-for]").forEach((slider) => {
      slider.hidden = !slider.dataset.for.split(" ").includes($("defense").value);
    });
  };
  // A hardened release scales its noise with the gradient, plain noise does not: each has its own sensible start.
  $("defense").addEventListener("change", () => { $("noise").value = $("defense").value === "hardened" ? 1.8 : -2; });
  $("controls").addEventListener("input", refresh);
  refresh();

  let upload = "";
  const take = (file) => {
    if (!file) return;
    const reader = new FileReader();
    reader.onload = () => {
      upload = String(reader.result).split(",")[1] ?? "";
      const own = $("own");
      own.hidden = false;
      own.querySelector("img").src = reader.result;
      own.querySelector("input").checked = true;
      preview();
    };
    reader.readAsDataURL(file);
  };
  $("file").addEventListener("change", () => take($("file").files[0]));
  const drop = $("drop");
  ["dragover", "dragleave", "drop"].forEach((name) => drop.addEventListener(name, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", name === "dragover");
    if (name === "drop") take(event.dataTransfer.files[0]);
  }));
  const chosen = () => document.querySelector('input[name="picture"]:checked');
  const preview = () => { $("original").src = chosen().nextElementSibling.src; };
  document.querySelector(".gallery").addEventListener("change", preview);
  preview();

  const empty = $("guess").src, narrow = matchMedia("(max-width: 959px)");
  let source = null, run = null, points = [];
  const say = (text, bad = false) => { $("status").textContent = text; $("status").classList.toggle("error", bad); };
  const busy = (on) => { $("run").disabled = on; $("stop").disabled = !on; };
  const finish = (text, bad = false) => {
    source?.close();
    source = run = null;
    busy(false);
    say(text, bad);
  };
  const png = (data) => `data:image/png;base64,${data}`;
  const fixed = (v, digits) => (v === null ? "–" : v.toFixed(digits));
  const scores = (event) => {
    $("guess").src = png(event.picture);
    $("ssim").textContent = fixed(event.ssim, 2);
    $("psnr").textContent = `${fixed(event.psnr, 1)} dB`;
  };
  let blind = 0;
  const handle = {
    waiting: () => say("Waiting for another tab to finish."),
    sent: (event) => {
      say("The attacker is at work.");
      blind = event.blind;
      $("original").src = png(event.original);
      $("blind").textContent = fixed(blind, 2);
      $("bytes").textContent = `${(event.bytes / 1000).toFixed(1)} kB`;
      $("share").textContent = percent(event.bytes / event.dense);
      $("blind-line").setAttribute("y1", 120 * (1 - blind));
      $("blind-line").setAttribute("y2", 120 * (1 - blind));
    },
    step: (event) => {
      scores(event);
      $("loss").textContent = fixed(event.loss, 4);
      $("step").textContent = `step ${event.step} of ${event.total}`;
      $("progress").value = event.step / event.total;
      points.push(`${(600 * event.step) / event.total},${120 * (1 - Math.max(0, event.ssim ?? 0))}`);
      $("line").setAttribute("points", points.join(" "));
    },
    done: (event) => {
      scores(event);
      const lead = event.ssim - blind;
      $("outcome").textContent = lead >= 0.25
        ? "The picture is recognisable: this upload gave it away."
        : lead > 0.02
          ? "The attacker beats a blind guess: this upload leaks, and more steps or another attack may leak more."
          : "This attacker did no better than a blind guess. One failed attack is no proof of privacy.";
      finish("Done.");
    },
    stopped: () => finish("Stopped."),
    error: (event) => finish(event.message, true),
  };

  $("controls").addEventListener("submit", async (submit) => {
    submit.preventDefault();
    busy(true);
    say("Sending the order.");
    points = [];
    $("line").setAttribute("points", "");
    $("outcome").textContent = "";
    $("guess").src = empty;
    $("step").textContent = "";
    $("progress").value = 0;
    if (narrow.matches) document.querySelector(".scene").scrollIntoView();
    ["ssim", "blind", "psnr", "bytes", "share", "loss"].forEach((id) => { $(id).textContent = "–"; });
    const own = chosen().value === "own";
    const order = {
      picture: own ? 0 : Number(chosen().value), upload: own ? upload : "", defense: $("defense").value,
      top: Number($("top").value), bottom: Number($("bottom").value), noise: noise(),
      rounds: Number($("rounds").value), mask_aware: $("mask_aware").checked, steps: Number($("steps").value),
    };
    let answer;
    try {
      const response = await fetch("runs", {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(order),
      });
      answer = await response.json();
      if (!response.ok) { finish(answer.message, true); return; }
    } catch {
      finish("The server does not answer. Is gradveil ui still running?", true);
      return;
    }
    run = answer.run;
    source = new EventSource(`runs/${run}`);
    source.onmessage = (message) => { const event = JSON.parse(message.data); handle[event.kind](event); };
    source.onerror = () => finish("The run broke off. The terminal of gradveil ui says why.", true);
  });
  $("stop").addEventListener("click", () => {
    if (!run) return;
    say("Stopping.");
    fetch(`runs/${run}/stop`, { method: "POST" }).catch(() => finish("The server does not answer.", true));
  });
})();
