"use strict";
const traces = JSON.parse(document.getElementById("data").textContent).traces;
const chosen = { run: 0, row: 0, round: 0 }; // indices of a trace, of its row, and of a round of that

const find = (id) => document.getElementById(id);
const trace = () => traces[chosen.run];
const row = () => trace().rows[chosen.row];

function make(tag, options = {}, ...children) {
  const { data, ...properties } = options;
  const node = Object.assign(document.createElement(tag), properties);
  Object.assign(node.dataset, data || {});
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const count = (number) => number.toLocaleString("en");
const chance = (p) => (p === null || p === undefined ? "-" : p >= 0.0005 || p === 0 ? p.toFixed(3) : p.toExponential(1));
const percent = (part, whole) => (whole ? ((100 * part) / whole).toFixed(1) + " %" : "-");
const duration = (s) => (s >= 1 ? s.toFixed(2) + " s" : s >= 0.001 ? (1000 * s).toFixed(2) + " ms" : (1e6 * s).toFixed(0) + " µs");
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

// A token as a reader recognizes it: line ends and blanks are visible, of many blanks their number.
function named(token) {
  const text = trace().names[token];
  if (text === undefined) return "#" + token;
  if (text === "" || text.includes("\ufffd")) return (text || "") + "#" + token;
  return text.replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5").replace(/^ +| +$/g, (blanks) => (blanks.length > 4 ? `\u2423\u00d7${blanks.length}` : "\u2423".repeat(blanks.length)));
}

// Who a token at a place of a round is from: a class of the style.
function kind(round, place) {
  if (place < round.judged_accepted) return "by" + (round.drafts[place].by % 4);
  if (!round.drafts.length) return "plain";
  return place < round.drafts.length ? "correction" : "bonus";
}

function legend() {
  const { proposers, forced, greedy } = trace();
  const entries = proposers.map((name, i) => ["by" + (i % 4), forced ? `where a draft of ${name} was accepted` : `draft of ${name}, accepted`]);
  if (proposers.length) {
    entries.push(["correction", forced ? "where a draft was rejected" : "the target's own token, after a draft was rejected"]);
    entries.push(["bonus", forced ? "after all drafts were accepted" : "the target's own token, after all drafts were accepted"]);
  }
  entries.push(["plain", proposers.length ? "the first token, and rounds without drafts" : "the target's own token"]);
  const shown = entries.map(([name, text]) => make("span", {}, make("span", { className: "token " + name }, " abc "), " " + text));
  const rule = greedy ? "a draft is accepted if it is the target's most likely token" : "a draft x is accepted with probability min(1, p(x) / q(x))";
  if (proposers.length) shown.push(make("span", { className: "quiet" }, `Greedy or sampled: ${rule}.`.replace("Greedy or sampled", greedy ? "Greedy" : "Sampled")));
  find("legend").replaceChildren(...shown);
}

function about() {
  const { settings, about, forced } = trace();
  const { draft, name, strategy, ...others } = settings;
  const values = Object.entries(others).map(([label, value]) => `${label.replace(/_/g, " ")} ${value}`);
  find("title").textContent = `${about.model}, draft ${draft}: ${plural(row().token_ids.length, "token")}`;
  document.title = find("title").textContent;
  const prompt = `${plural(row().prompt_tokens, "token")} of prompt`;
  find("about").textContent = [...values, prompt, about.dtype, about.device, about.date.replace("T", " ")].join(" \u00b7 ");
  const notes = [];
  if (strategy) notes.push(`The tokens are chosen by a strategy of its own, ${strategy}. What it does not say of its distributions is shown as "-".`);
  if (!about.loaded) notes.push("The weights were not loaded from a checkpoint. If they are random, acceptance says nothing about real models.");
  if (forced) notes.push("Teacher-forced: after each round the tokens of a given text replace those that the round would have emitted, so that each round drafts in the real context.");
  document.querySelectorAll("header .note").forEach((note) => note.remove());
  find("about").after(...notes.map((note) => make("p", { className: "note" }, note)));
  find("versions").textContent = "Made by qspec-jax. " + Object.entries(about.versions).map((pair) => pair.join(" ")).join(", ");
}

function chooser() {
  const selects = [];
  const add = (name, label, options) => {
    if (options.length < 2) return;
    const select = make("select", { id: "choose-" + name }, ...options.map((text, i) => make("option", { value: i, textContent: text })));
    select.value = chosen[name];
    select.onchange = () => show({ ...(name === "run" ? { row: 0 } : {}), [name]: Number(select.value), round: 0 });
    selects.push(make("label", {}, label + " ", select));
  };
  add("run", "Run", traces.map((each, i) => each.settings.name || `run ${i}`));
  add("row", "Row", trace().rows.map((each, i) => `${i}: ${plural(each.token_ids.length, "token")}, ended by ${each.finish_reason}`));
  find("chosen").replaceChildren(...selects);
  find("chosen").hidden = !selects.length;
}

function figures() {
  const { rounds, token_ids } = row();
  const { proposers, seconds, prefill_s, rows } = trace();
  const [drafted, accepted] = ["drafted", "accepted"].map((name) => sum(rounds.map((round) => round[name])));
  const entries = [["new-tokens", "new tokens", token_ids.length, count(token_ids.length)], ["rounds", "rounds", rounds.length, count(rounds.length)]];
  if (proposers.length) {
    entries.push(["accepted", "accepted / drafted", accepted, `${percent(accepted, drafted)} (${count(accepted)} of ${count(drafted)})`]);
    entries.push(["length", "tokens a round", rounds.length ? 1 + accepted / rounds.length : 0, rounds.length ? (1 + accepted / rounds.length).toFixed(2) : "-"]);
  }
  const flushes = rounds.filter((round) => round.flushed).length;
  entries.push(["flushes", "flushes", flushes, count(flushes)]);
  const decode = sum(seconds.flat());
  const tokens = sum(rows.map((each) => each.token_ids.length - 1));
  if (prefill_s !== null) entries.push(["prefill", "prefill", prefill_s, duration(prefill_s)]);
  entries.push(["decode", rows.length > 1 ? "rounds of all rows" : "time of the rounds", decode, duration(decode)]);
  if (tokens > 0 && !trace().forced) entries.push(["token", rows.length > 1 ? "a token, all rows" : "a token", decode / tokens, duration(decode / tokens)]);
  const shown = entries.map(([id, label, value, text]) => {
    return make("div", {}, make("dt", {}, label), make("dd", { id: "figure-" + id, data: { value } }, text));
  });
  find("figures").replaceChildren(...shown);
}

function tokenOf(index, className) {
  const { pieces, token_ids } = row();
  const node = make("span", { className: "token " + className, data: { index } });
  if (pieces && pieces[index]) {
    node.textContent = pieces[index];
    return node;
  }
  const name = named(token_ids[index]);
  node.append(pieces ? make("span", { className: "mark", title: `token ${token_ids[index]}` }, name) : name + " ");
  return node;
}

function text() {
  const { rounds, token_ids, prompt_end } = row();
  const nodes = [];
  if (prompt_end !== null) nodes.push(make("span", { className: "prompt" }, (prompt_end ? "\u2026" : "") + prompt_end));
  if (token_ids.length) nodes.push(tokenOf(0, "prefill"));
  rounds.forEach((round, i) => {
    const end = Math.min(round.first + round.emitted, token_ids.length);
    const tokens = [];
    for (let at = round.first; at < end; at++) tokens.push(tokenOf(at, kind(round, at - round.first)));
    if (!tokens.length) return;
    const label = `Round ${i + 1}: ${plural(tokens.length, "token")}, ${round.accepted} of ${plural(round.drafted, "draft")} accepted`;
    const node = make("span", { className: "round", id: "round-" + (i + 1), title: label, tabIndex: -1, data: { round: i } }, ...tokens);
    node.setAttribute("role", "button");
    node.setAttribute("aria-label", label);
    node.onclick = () => show({ round: i }, true);
    nodes.push(node);
  });
  find("text").replaceChildren(...nodes);
}

const likely = (found) => make("td", { className: "likely" }, ...found.map(([token, p]) => make("span", {}, make("b", {}, named(token)), " " + chance(p))));

// Why a round has fewer drafts than gamma; null if it has not.
function limit(round) {
  const { gamma, adaptive, room, wanted } = round.limits;
  const asked = Math.max(0, Math.min(...[gamma, adaptive, room, wanted].filter((number) => number !== null)));
  const drafts = round.drafts.length;
  if (drafts >= gamma) return null;
  if (drafts < asked) {
    const confidence = trace().settings.min_draft_confidence;
    const why = confidence ? `its most likely token had a probability below ${confidence}, or it had no more to propose` : "it had no more to propose";
    return `The draft stopped at ${drafts} of ${asked}: ${why}.`;
  }
  if (asked === room) return `At most ${plural(asked, "draft")}: no round goes past the next flush of the cache, or over a full cache past the next multiple of its span of tokens.`;
  if (asked === Math.max(0, wanted)) return `At most ${plural(asked, "draft")}: only ${plural(wanted + 1, "more token")} ${wanted ? "are" : "is"} wanted.`;
  return `At most ${plural(asked, "draft")}: adaptive speculation chose that by the row's past acceptance.`;
}

function verdict(round, i) {
  const draft = round.drafts[i];
  const { greedy, forced } = trace();
  if (i > round.judged_accepted) return ["not judged", i === round.judged_accepted + 1 ? "since the one before was rejected" : ""];
  const accepted = i < round.judged_accepted;
  let why = "";
  if (greedy && !accepted) why = `the target's most likely token is ${round.likely[i].length ? named(round.likely[i][0][0]) : "another"}`;
  if (greedy && accepted) why = "the target's most likely token";
  if (draft.uniform !== null) {
    const ratio = draft.q ? draft.p / draft.q : Infinity;
    why = `u ${chance(draft.uniform)} ${accepted ? "<" : "\u2265"} p/q ${ratio >= 1000 ? "> 1000" : chance(ratio)}`;
  }
  if (accepted && i >= round.emitted && !forced) why += "; after the end of the row";
  return [accepted ? "accepted" : "rejected", why];
}

function own(round) {
  const { greedy, forced } = trace();
  if (round.emitted <= round.judged_accepted) return "not used: the row ended within the accepted drafts";
  if (forced) return "what the target would have gone on with; the text's own token follows";
  if (!round.drafts.length) return greedy ? "the target's most likely token; there were no drafts" : "drawn from p; there were no drafts";
  if (round.judged_accepted < round.drafts.length) {
    return greedy ? "replaces the rejected draft" : "replaces the rejected draft: drawn from max(p - q, 0), normalized";
  }
  return greedy ? "follows, since all drafts were accepted" : "follows, since all drafts were accepted: drawn from p";
}

function panel() {
  const { rounds, token_ids } = row();
  const { proposers, forced, phases, seconds } = trace();
  const round = rounds[chosen.round];
  if (!round) return find("round").replaceChildren(make("p", {}, "There are no rounds: prefill gave the only token."));
  const drawn = round.drafts.some((draft) => draft.uniform !== null);
  const drafting = proposers.length > 0;
  const heads = [
    "", "token", ...(drafting ? ["q"] : []), "p", ...(drawn ? ["min(1, p/q)"] : []), ...(forced ? ["text"] : []),
    drafting ? "verdict" : "", ...(drafting ? ["draft's most likely"] : []), "target's most likely",
  ];
  const code = (token, className) => make("code", { className: className || "" }, named(token));
  const number = (value) => make("td", { className: "number" }, chance(value));
  const real = (place) => (round.first + place < token_ids.length ? code(token_ids[round.first + place]) : "-");
  const lines = round.drafts.map((draft, i) => {
    const [word, why] = verdict(round, i);
    const ratio = draft.p === null || draft.q === null ? null : draft.q ? Math.min(1, draft.p / draft.q) : 1;
    const by = proposers.length > 1 ? make("div", { className: "quiet" }, proposers[draft.by]) : null;
    const className = word === "accepted" ? "by" + (draft.by % 4) : "";
    return make(
      "tr", { className: word === "not judged" ? "unused" : "", data: { verdict: word } },
      make("td", {}, String(i + 1)), make("td", {}, code(draft.token, className), by), number(draft.q), number(draft.p),
      drawn ? number(ratio) : null, forced ? make("td", {}, real(i)) : null,
      make("td", { className: "verdict" }, make("div", { className: "verdict-" + word.split(" ")[0] }, word), make("div", { className: "quiet" }, why)),
      likely(draft.likely), likely(round.likely[i]),
    );
  });
  const place = round.judged_accepted;
  lines.push(make(
    "tr", { data: { verdict: "own" } },
    make("td", {}, ""), make("td", {}, code(round.own_token, kind(round, place))), drafting ? number(null) : null, number(round.own_p),
    drawn ? number(null) : null, forced ? make("td", {}, real(place)) : null,
    make("td", { className: "verdict" }, make("div", {}, "target's own token"), make("div", { className: "quiet" }, own(round))),
    drafting ? likely([]) : null, likely(round.likely[place]),
  ));
  const last = Math.min(round.first + round.emitted, token_ids.length);
  const cut = round.first + round.emitted - last;
  const numbers = last > round.first + 1 ? `New tokens ${round.first + 1} to ${last}.` : `New token ${last}.`;
  const counts = `${plural(round.drafted, "draft")}, ${round.accepted} accepted${forced ? "" : `, ${plural(round.emitted, "token")} emitted`}.`;
  const facts = [
    drafting ? `${numbers} ${counts}` : numbers,
    cut ? `The last ${plural(cut, "token")} ${cut === 1 ? "is" : "are"} cut off: ${forced ? "the text ends before" : "a stop string ended the row"}.` : null,
    limit(round),
    round.flushed ? "After this round the oldest buffered tokens are quantized (a flush)." : null,
  ];
  const { greedy } = trace();
  const after = greedy ? "at temperature 1" : "after temperature and filters";
  const explained = drafting
    ? `q: probability by the draft; p: by the target, both ${after}${greedy ? "." : "; u: the number drawn from [0, 1)."}`
    : `p: probability by the target, ${after}.`;
  const times = seconds[chosen.round] || [];
  const parts = times.map((each, i) => `${phases[i]} ${duration(each)}`).join(", ");
  const button = (label, text, step) => make("button", { type: "button", textContent: text, ariaLabel: label, onclick: () => show({ round: chosen.round + step }, true) });
  find("round").replaceChildren(
    make("div", { className: "head" }, make("h2", {}, `Round ${chosen.round + 1} of ${rounds.length}`),
      make("span", {}, button("Previous round", "\u2190", -1), " ", button("Next round", "\u2192", 1))),
    ...facts.filter(Boolean).map((fact) => make("p", {}, fact)),
    make("div", { className: "wide" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", {}, head)))), make("tbody", {}, ...lines))),
    make("p", { className: "quiet" }, explained),
    stacked(times, Math.max(...seconds.map(sum), 1e-9)), make("p", { className: "quiet" }, parts),
  );
}

function stacked(values, whole) {
  const { phases } = trace();
  const spans = values.map((value, i) => {
    const node = make("span", { className: phases[i] === "round" ? "round-all" : phases[i], title: `${phases[i]} ${duration(value)}` });
    node.style.width = (100 * value) / whole + "%";
    return node;
  });
  return make("div", { className: "bar" }, ...spans);
}

function places() {
  const { rounds } = row();
  const most = Math.max(0, ...rounds.map((round) => round.drafted));
  if (!most) return find("places").replaceChildren();
  const lines = [];
  for (let place = 1; place <= most; place++) {
    const drafted = rounds.filter((round) => round.drafted >= place).length;
    const accepted = rounds.filter((round) => round.accepted >= place).length;
    const judged = rounds.filter((round) => round.drafted >= place && round.accepted >= place - 1).length;
    const bar = make("span", { className: "draft" });
    bar.style.width = (100 * accepted) / drafted + "%";
    lines.push(make("tr", { data: { drafted, accepted, judged } },
      make("td", {}, String(place)), make("td", {}, make("div", { className: "bar" }, bar)),
      make("td", { className: "number" }, `${percent(accepted, drafted)} (${count(accepted)} of ${count(drafted)})`),
      make("td", { className: "number" }, percent(accepted, judged))));
  }
  const heads = ["place", "", "accepted / drafted", "given those before"].map((head) => make("th", {}, head));
  find("places").replaceChildren(
    make("h2", {}, "Acceptance by place in the round"),
    make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...lines)),
  );
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function times() {
  const { phases, seconds, rows } = trace();
  if (!seconds.length) return find("times").replaceChildren();
  const totals = phases.map((_, i) => sum(seconds.map((each) => each[i])));
  const whole = sum(totals);
  const lines = phases.map((phase, i) => make("tr", {},
    make("td", {}, make("span", { className: "key " + (phase === "round" ? "round-all" : phase) }), phase),
    make("td", { className: "number" }, duration(totals[i])), make("td", { className: "number" }, percent(totals[i], whole)),
    make("td", { className: "number" }, duration(totals[i] / seconds.length))));
  const heads = ["phase", "all rounds", "share", "a round, mean"].map((head) => make("th", {}, head));
  const canvas = make("canvas", { width: Math.min(seconds.length * 3, 1200), height: 80, id: "timeline" });
  canvas.className = "timeline";
  const top = [...seconds.map(sum)].sort((a, b) => a - b)[Math.floor(0.98 * (seconds.length - 1))];
  const pen = canvas.getContext("2d");
  const fills = phases.map((phase) => colour(phase === "round" ? "--verify" : "--" + phase));
  seconds.forEach((each, i) => {
    let base = canvas.height;
    const [left, right] = [i, i + 1].map((at) => Math.floor((at * canvas.width) / seconds.length));
    each.forEach((value, k) => {
      const height = (value / (top || 1)) * canvas.height;
      pen.fillStyle = fills[k];
      pen.fillRect(left, base - height, Math.max(1, right - left - (right - left > 2 ? 1 : 0)), height);
      base -= height;
    });
  });
  const each = phases.length > 1 ? "phase" : "round";
  const note = `With dispatch, and the wait for the device after each ${each}: a traced run has a program for each ${each}, and an untraced one runs all rounds in one.`;
  find("times").replaceChildren(
    make("h2", {}, rows.length > 1 ? "Time of the phases, all rows together" : "Time of the phases"),
    stacked(totals, whole),
    make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...lines)),
    make("figure", {}, canvas, make("figcaption", {}, `Rounds from left to right; full height: ${duration(top)}. ${note}`)),
  );
}

const bytes = (coded) => Uint8Array.from(atob(coded), (letter) => letter.charCodeAt(0));

// A map with groups from top to bottom. columns: of the bytes that are given row by row of [columns, groups].
function heat(coded, [columns, groups], width, describe, pick) {
  const found = bytes(coded);
  const canvas = make("canvas", { width: Math.max(1, columns), height: Math.max(1, groups) });
  canvas.style.width = width + "px";
  canvas.style.height = Math.min(320, Math.max(96, groups * 6)) + "px";
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(canvas.width, canvas.height);
  const rgb = colour("--read").split(",").map(Number);
  for (let x = 0; x < columns; x++) {
    for (let y = 0; y < groups; y++) image.data.set([...rgb, found[x * groups + y]], 4 * (y * columns + x));
  }
  pen.putImageData(image, 0, 0);
  const readout = make("figcaption", {});
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    const inside = (at, size, cells) => Math.min(cells - 1, Math.max(0, Math.floor((at / size) * cells)));
    return [inside(event.clientX - box.left, box.width, columns), inside(event.clientY - box.top, box.height, groups)];
  };
  readout.textContent = describe(null);
  canvas.onmousemove = (event) => {
    const [x, y] = place(event);
    readout.textContent = describe([x, y, found[x * groups + y] / 255]);
  };
  canvas.onmouseleave = () => (readout.textContent = describe(null));
  if (pick) canvas.onclick = (event) => pick(place(event)[0]);
  return make("figure", {}, canvas, readout);
}

function reads() {
  const found = row().reads;
  if (!found || !found.over_rounds_shape[1]) return find("reads").replaceChildren();
  const { group_size: size, groups_per_bin: groups, rounds_per_bin: rounds } = found;
  const group = (y) => {
    const name = groups === 1 ? `group ${y}` : `groups ${y * groups} to ${y * groups + groups - 1}`;
    return `${name} (tokens ${count(y * groups * size)} to ${count((y + 1) * groups * size - 1)})`;
  };
  const share = (part) => `${(100 * part).toFixed(0)} %`;
  const [columns] = found.over_rounds_shape;
  const layers = found.over_layers_shape[0];
  const overRounds = heat(found.over_rounds, found.over_rounds_shape, Math.min(900, Math.max(280, columns * 6)), (at) => {
    if (!at) return "Over time: a column for each round, from left to right.";
    const name = rounds === 1 ? `Round ${at[0] + 1}` : `Rounds ${at[0] * rounds + 1} to ${(at[0] + 1) * rounds}`;
    return `${name}, ${group(at[1])}: read by ${share(at[2])} of the KV heads of all layers.`;
  }, (x) => show({ round: x * rounds }, true));
  const overLayers = heat(found.over_layers, found.over_layers_shape, Math.min(400, Math.max(120, layers * 14)), (at) => {
    if (!at) return "Over layers: a column for each, the mean of all rounds.";
    return `Layer ${at[0] + 1} of ${layers}, ${group(at[1])}: read by ${share(at[2])} of its KV heads, the mean of the rounds.`;
  });
  find("reads").replaceChildren(
    make("h2", {}, "What the drafts read of the cache"),
    make("p", { className: "quiet" }, `Groups of ${size} tokens from top to bottom, the first tokens at the top. Light to dark:`,
      make("span", { className: "scale" }), "read by no KV head, to all. White, too, is a group that was not there yet. The newest tokens, which are not in a group yet, are always read."),
    make("div", { className: "maps" }, overRounds, overLayers),
  );
}

function mark(scroll) {
  document.querySelectorAll(".round.selected").forEach((node) => {
    node.classList.remove("selected");
    node.tabIndex = -1;
  });
  const node = find("round-" + (chosen.round + 1));
  if (!node) return;
  node.classList.add("selected");
  node.tabIndex = 0;
  if (!scroll) return;
  const box = find("text");
  const [inner, outer] = [node.getBoundingClientRect(), box.getBoundingClientRect()];
  if (inner.top < outer.top || inner.bottom > outer.bottom) box.scrollTop += inner.top - outer.top - outer.height / 3;
}

function everything() {
  about();
  chooser();
  figures();
  legend();
  text();
  places();
  times();
  reads();
}

function show(changes, remember = false) {
  const before = { ...chosen };
  Object.assign(chosen, changes);
  const clamp = (number, size) => (Number.isInteger(number) ? Math.min(Math.max(0, number), Math.max(0, size - 1)) : 0);
  chosen.run = clamp(chosen.run, traces.length);
  chosen.row = clamp(chosen.row, trace().rows.length);
  chosen.round = clamp(chosen.round, row().rounds.length);
  if (before.run !== chosen.run || before.row !== chosen.row || !find("title").textContent) everything();
  mark(true);
  panel();
  if (!remember) return;
  const names = [...(traces.length > 1 ? ["run"] : []), ...(trace().rows.length > 1 ? ["row"] : [])];
  if (location.protocol !== "about:") history.replaceState(null, "", "#" + [...names.map((name) => `${name}=${chosen[name]}`), `round=${chosen.round + 1}`].join("&"));
  if (matchMedia("(max-width: 60rem)").matches) find("round").scrollIntoView({ block: "nearest" });
}

function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const number = (name, base) => (asked.has(name) ? Number(asked.get(name)) - base : 0);
  show({ run: number("run", 0), row: number("row", 0), round: number("round", 1) });
}

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.tagName === "SELECT") return;
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  event.preventDefault();
  show({ round: chosen.round + step }, true);
});
window.addEventListener("hashchange", fromAddress);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", everything);
fromAddress();
