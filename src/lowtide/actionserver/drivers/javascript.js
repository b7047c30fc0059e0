// JavaScript in node: one global scope that is kept, and the last expression's value.
const fs = require('fs'), vm = require('vm'), util = require('util'), readline = require('readline');
const [requests, answers] = process.argv.slice(-3, -1).map(Number), mark = process.argv[process.argv.length - 1];
globalThis.require = require;
let count = 0;
const put = (fd, text) => { for (let data = Buffer.from(text); data.length;) {
  try { data = data.subarray(fs.writeSync(fd, data)); } catch (error) { if (error.code !== 'EAGAIN') throw error; } } };
readline.createInterface({ input: fs.createReadStream(null, { fd: requests }) }).on('line', async (line) => {
  const request = JSON.parse(line), answer = { execution_count: ++count, results: [], error: null };
  try {
    if (request.cwd) process.chdir(request.cwd);
    const value = await vm.runInThisContext(request.code, { filename: `<code ${count}>`, breakOnSigint: true });
    if (value !== undefined) answer.results.push({ 'text/plain': util.inspect(value) });
  } catch (error) {
    answer.error = error instanceof Error || (error && error.stack)
      ? { name: error.name, value: error.message, traceback: error.stack }
      : { name: 'Error', value: String(error), traceback: '' };
  }
  for (const fd of [1, 2]) put(fd, `\u001e${mark}\u001f`);
  put(answers, JSON.stringify(answer) + '\n');
});
