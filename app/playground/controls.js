// The sampling controls: one table with range, default and meaning; builds the form, reads and validates it.
// A control at its default is left out of the request.

const number = (name, group, fallback, min, max, step, meaning) => ({ name, group, fallback, min, max, step, meaning, kind: "number" });

export const CONTROLS = [
  { name: "system", group: "Conversation", kind: "text", fallback: "", meaning: "System message put before the conversation (chat only)." },
  number("max_tokens", "Length", 512, 1, 10000000, 1, "At most this many tokens; empty means until stopped, for endless streams only."),
  number("min_tokens", "Length", 0, 0, 100000, 1, "No end of text before this many tokens."),
  { name: "stop", group: "Length", kind: "lines", fallback: "", meaning: "Stop strings, one a line; the answer ends before them." },
  { name: "ignore_eos", group: "Length", kind: "check", fallback: false, meaning: "Go on past the model's own end of text." },
  number("temperature", "Shape", 0.7, 0, 2, 0.05, "0 always takes the most likely token; higher is more varied."),
  number("top_k", "Shape", 0, -1, 100000, 1, "Keep only the k most likely tokens; 0 keeps all."),
  number("top_p", "Shape", 1, 0.001, 1, 0.01, "Keep the most likely tokens that together reach this probability."),
  number("min_p", "Shape", 0, 0, 1, 0.01, "Cut tokens less likely than this share of the best one."),
  number("typical_p", "Shape", 1, 0.001, 1, 0.01, "Keep the tokens whose surprise is nearest to the average one."),
  number("top_n_sigma", "Shape", 0, 0, 10, 0.1, "Keep tokens within n standard deviations of the best logit; 0 is off."),
  number("dynatemp_range", "Shape", 0, 0, 2, 0.05, "Let the temperature move by this much with the entropy; 0 is off."),
  number("dynatemp_exponent", "Shape", 1, 0.01, 10, 0.05, "How steeply the temperature follows the entropy."),
  number("xtc_probability", "Shape", 0, 0, 1, 0.05, "Chance to cut all but the last of the very likely tokens."),
  number("xtc_threshold", "Shape", 0.1, 0, 1, 0.01, "What counts as very likely for the control above."),
  number("repetition_penalty", "Repetition", 1, 0.01, 10, 0.01, "Above 1 makes tokens already seen less likely."),
  number("presence_penalty", "Repetition", 0, -2, 2, 0.05, "Taken once off tokens that occurred in the answer."),
  number("frequency_penalty", "Repetition", 0, -2, 2, 0.05, "Taken off for each time a token occurred in the answer."),
  number("dry_multiplier", "Repetition", 0, 0, 5, 0.05, "Strength against repeating whole phrases (DRY); 0 is off."),
  number("dry_base", "Repetition", 1.75, 1, 4, 0.05, "How fast the penalty grows with the phrase's length."),
  number("dry_allowed_length", "Repetition", 2, 1, 100, 1, "Phrases up to this many tokens may repeat."),
  { name: "seed", group: "Chance", kind: "number", fallback: "", min: -9223372036854775808, max: 9223372036854775807, step: 1, meaning: "The same seed gives the same answer; empty draws one." },
  { name: "retention", group: "Endless streams", kind: "choice", fallback: "none", options: ["none", "sinks", "window", "restart"], meaning: "What to keep past the window: “sinks” keeps the first tokens and the newest ones." },
  number("sink_tokens", "Endless streams", 4, 0, 4096, 1, "How many first tokens stay for ever."),
  number("window", "Endless streams", 1020, 16, 1048576, 1, "How many newest tokens stay."),
  number("trace", "X-ray", 8, 0, 20, 1, "Candidates shown for each token in the X-ray; 0 turns it off."),
];

function field(control) {
  const id = `control-${control.name}`;
  let input;
  if (control.kind === "choice") {
    input = document.createElement("select");
    for (const option of control.options) input.add(new Option(option, option));
  } else if (control.kind === "text" || control.kind === "lines") {
    input = document.createElement("textarea");
    input.rows = 2;
  } else {
    input = document.createElement("input");
    input.type = control.kind === "check" ? "checkbox" : "number";
    if (control.kind === "number") Object.assign(input, { min: control.min, max: control.max, step: control.step === 1 ? 1 : "any" });
  }
  Object.assign(input, { id, name: control.name });
  input.setAttribute("aria-describedby", `${id}-meaning`);
  return input;
}

function set(input, control, value) {
  if (control.kind === "check") input.checked = Boolean(value);
  else input.value = value;
}

function row(control) {
  const box = document.createElement("div");
  box.className = "control";
  const label = document.createElement("label");
  label.htmlFor = `control-${control.name}`;
  label.textContent = control.name;
  const input = field(control);
  set(input, control, control.fallback);
  const meaning = document.createElement("small");
  meaning.id = `control-${control.name}-meaning`;
  const range = control.kind === "number" && control.name !== "seed" ? ` ${control.min} to ${control.max}, default ${control.fallback}.` : "";
  meaning.textContent = control.meaning + range;
  box.append(label, input, meaning);
  return box;
}

export function build(form, onChange) {
  let group = "";
  for (const control of CONTROLS) {
    if (control.group !== group) {
      group = control.group;
      const heading = document.createElement("p");
      heading.className = "group";
      heading.textContent = group;
      form.append(heading);
    }
    form.append(row(control));
  }
  const reset = Object.assign(document.createElement("button"), { type: "button", textContent: "Back to defaults", id: "controls-reset" });
  reset.addEventListener("click", () => {
    for (const control of CONTROLS) set(form.elements[control.name], control, control.fallback);
    mark(form);
    onChange();
  });
  form.append(reset);
  form.addEventListener("input", () => {
    mark(form);
    onChange();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
}

function mark(form) {
  for (const control of CONTROLS) {
    const input = form.elements[control.name];
    const value = control.kind === "check" ? input.checked : input.value;
    input.closest(".control").dataset.changed = String(value) !== String(control.fallback);
  }
}

// The first control that holds a value outside its range, as {name, message}, or null.
export function problem(form) {
  for (const control of CONTROLS) {
    const input = form.elements[control.name];
    if (!input.validity.valid) return { name: control.name, message: `${control.name}: ${input.validationMessage}` };
  }
  return null;
}

// The request fields these controls stand for; a value at its default is left out where the server's default is the same.
export function read(form) {
  const fields = {};
  const value = (name) => form.elements[name].value.trim();
  for (const control of CONTROLS) {
    if (["system", "retention", "sink_tokens", "window", "max_tokens", "stop", "seed"].includes(control.name)) continue;
    if (control.kind === "check") {
      if (form.elements[control.name].checked) fields[control.name] = true;
    } else if (value(control.name) !== "" && (control.name === "temperature" || Number(value(control.name)) !== control.fallback || control.name === "trace")) {
      fields[control.name] = Number(value(control.name));
    }
  }
  if (fields.trace === 0) delete fields.trace;
  const stops = form.elements.stop.value.split("\n").filter((line) => line !== "");
  if (stops.length) fields.stop = stops;
  if (value("seed") !== "") fields.seed = Number(value("seed"));
  fields.max_tokens = value("max_tokens") === "" ? null : Number(value("max_tokens"));
  if (value("retention") !== "none") {
    fields.retention = { policy: value("retention"), sink_tokens: Number(value("sink_tokens")), window: Number(value("window")) };
    if (value("retention") === "window") delete fields.retention.sink_tokens;
  }
  return fields;
}
