"use strict";
/* Functions of both pages. Texts of the user reach a page as text nodes. */
function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  if (text !== "") made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
const at = (id) => document.getElementById(id);
const UNITS = [["GiB", 30], ["MiB", 20], ["KiB", 10]];
const digits = (value) => (Math.abs(value) >= 99.95 ? 0 : Math.abs(value) >= 9.995 ? 1 : 2);
const ms = (seconds) => `${(seconds * 1e3).toFixed(digits(seconds * 1e3))} ms`;
/* The unit of an axis on which all of these lie. */
const unitOf = (bytes) => UNITS.find(([, power]) => Math.max(...bytes) >= 2 ** power) || UNITS.at(-1);
function size(bytes) {
  const [unit, power] = unitOf([bytes]);
  return `${(bytes / 2 ** power).toFixed(digits(bytes / 2 ** power))} ${unit}`;
}
/* Text that is compressed in an element, in base 85 (`packed` in page.py). */
async function unpacked(id) {
  const ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%.()*+-;,=>?@^_`{|}~";
  const values = new Uint8Array(128);
  for (let i = 0; i < 85; i++) values[ALPHABET.charCodeAt(i)] = i;
  const text = at(id).textContent, groups = Math.ceil(text.length / 5), words = new DataView(new ArrayBuffer(4 * groups));
  for (let group = 0; group < groups; group++) {
    let word = 0;
    for (let i = 5 * group; i < 5 * group + 5; i++) word = word * 85 + (i < text.length ? values[text.charCodeAt(i)] : 84);
    words.setUint32(4 * group, word);
  }
  const bytes = new Uint8Array(words.buffer, 0, 4 * groups - (5 * groups - text.length)); // the last group may be shorter
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}
/* Run the script that is compressed in an element. */
async function load(id) {
  const made = element("script");
  made.textContent = await unpacked(id);
  document.head.append(made);
}
/* Say why a page cannot be unpacked. */
function unreadable(error) {
  at("unreadable").querySelector("span").textContent = window.DecompressionStream ? `it is damaged (${error})` : "it needs a browser of 2023 or later";
  at("unreadable").hidden = false;
  document.documentElement.dataset.ready = "true";
}
