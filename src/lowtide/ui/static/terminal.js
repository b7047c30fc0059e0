// The terminal of one sandbox, in a document of its own: xterm.js needs inline styles, which the page itself forbids.
import { Terminal } from "/xterm.js";
import { FitAddon } from "/addon-fit.js";

const [provider, id] = location.hash.slice(1).split("/").map(decodeURIComponent);
const terminal = new Terminal({ cursorBlink: true, fontSize: 14, screenReaderMode: true, theme: { background: "#0f1a1e" } });
const fit = new FitAddon();
terminal.loadAddon(fit);
terminal.open(document.getElementById("terminal"));
fit.fit();

const path = `/api/sandbox/${encodeURIComponent(provider)}/${encodeURIComponent(id)}/terminal`;
const socket = new WebSocket(`ws://${location.host}${path}`);
socket.binaryType = "arraybuffer";
const encoder = new TextEncoder();
const resize = () => {
  fit.fit();
  if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ columns: terminal.cols, rows: terminal.rows }));
};
const early = []; // typed before the shell is there
socket.onopen = () => { resize(); terminal.focus(); for (const data of early.splice(0)) socket.send(data); };
socket.onmessage = (event) => terminal.write(new Uint8Array(event.data));
socket.onclose = (event) => terminal.write(`\r\n\x1b[2mdisconnected${event.reason ? ": " + event.reason.replace(/[\x00-\x1f]/g, " ") : ""}\x1b[0m\r\n`);
terminal.onData((text) => {
  const data = encoder.encode(text);
  if (socket.readyState === WebSocket.OPEN) socket.send(data);
  else if (socket.readyState === WebSocket.CONNECTING && early.length < 1000) early.push(data);
});
addEventListener("resize", resize);
