"use strict";
// Unpacks the texts of the page, which are compressed by gzip and in base 85, and runs its two scripts.
(async () => {
  const ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;/=>?@^_`{|}~";
  const digits = new Uint8Array(128);
  for (let at = 0; at < 85; at += 1) digits[ALPHABET.charCodeAt(at)] = at;

  // Five digits are four bytes; a text that ends within five is filled up with the highest digit.
  function bytesOf(text) {
    const lacking = (5 - text.length % 5) % 5, filled = text + "~".repeat(lacking);
    const view = new DataView(new ArrayBuffer(filled.length / 5 * 4));
    for (let at = 0; at < filled.length; at += 5) {
      let value = 0;
      for (let digit = at; digit < at + 5; digit += 1) value = value * 85 + digits[filled.charCodeAt(digit)];
      view.setUint32(at / 5 * 4, value);
    }
    return new Uint8Array(view.buffer, 0, view.byteLength - lacking);
  }

  async function unpacked(id) {
    const bytes = bytesOf(document.getElementById(id).textContent);
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  function run(text) {
    const script = document.createElement("script");
    script.textContent = text;
    document.head.append(script);
  }

  const standing = document.getElementById("standing");
  standing.textContent = "This page is being unpacked.";
  try {
    const [plotly, page, content] = await Promise.all(["plotly", "page", "content"].map(unpacked));
    window.content = JSON.parse(content);
    run(plotly);
    run(page);
  } catch (error) {
    standing.textContent = `This page needs a browser of 2023 or later, with DecompressionStream (${error.message}).`;
  }
})();
