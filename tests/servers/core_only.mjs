// An A2M 0.1 server of the core alone for Node.js, without dependencies, on stdio.
//
//   node tests/servers/core_only.mjs [--file PATH] [--where-on-timeline]
//
// Records live in memory, and in a file of one JSON object per line if one is named: each change is appended and synced
// before it is acknowledged, and replayed at the next start.

import { randomUUID } from 'node:crypto';
import { closeSync, existsSync, fsyncSync, openSync, readFileSync, truncateSync, writeFileSync } from 'node:fs';
import { parseArgs } from 'node:util';

const PROTOCOL = 'a2m/0.1';

const PARSE_ERROR = -32700;
const INVALID_REQUEST = -32600;
const METHOD_NOT_FOUND = -32601;
const INVALID_PARAMS = -32602;
const INTERNAL_ERROR = -32603;
const CAPABILITY_NOT_SUPPORTED = -32003;
const PROTOCOL_NOT_SUPPORTED = -32007;

// methods of capabilities that this server does not declare (§2)
const ELSEWHERE = new Map([
  ['memory/promote', 'tiers'],
  ['memory/consolidate', 'tiers'],
  ['memory/reinforce', 'salience'],
  ['memory/session/list', 'sessions'],
  ['memory/session/close', 'sessions'],
  ['memory/fetch', 'keys'],
  ['memory/events', 'events'],
  ['memory/events/subscribe', 'events'],
  ['memory/events/unsubscribe', 'events'],
  ['memory/summarize', 'summarize'],
]);

class A2MError extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

// --- reading parameters: null is the same as absent

const isObject = (value) => typeof value === 'object' && value !== null && !Array.isArray(value);
const isString = (value) => typeof value === 'string';
const isCount = (value) => Number.isInteger(value) && value >= 0;
const isMetadata = (value) => isObject(value) && isShallow(value);
const isStrings = (value) => Array.isArray(value) && value.every(isString);

/** JSON.parse reads what nests however deeply, and JSON.stringify could not write it again. */
function isShallow(value) {
  let level = [value];
  for (let depth = 0; depth < 200; depth += 1) {
    level = level.flatMap((each) => (typeof each === 'object' && each !== null ? Object.values(each) : []));
    if (level.length === 0) return true;
  }
  return false;
}

function optional(holder, name, fits, expected) {
  const value = holder[name] ?? undefined;
  if (value !== undefined && !fits(value)) throw new A2MError(INVALID_PARAMS, `${name}: expected ${expected}`);
  return value;
}

function required(holder, name, fits, expected) {
  const value = optional(holder, name, fits, expected);
  if (value === undefined) throw new A2MError(INVALID_PARAMS, `${name}: expected ${expected}, got nothing`);
  return value;
}

// --- matching and ranking

const own = (object, name) => (Object.hasOwn(object, name) ? object[name] : undefined);

/** Whether a record has what `where` asks for: fields first, then metadata; an array means any of (§5.2). */
function matches(record, where) {
  return Object.entries(where).every(([name, wanted]) => {
    const value = own(record, name) ?? own(record.metadata ?? {}, name) ?? null;
    return Array.isArray(wanted) ? wanted.includes(value) : value === wanted;
  });
}

const words = (text) => new Set(text.toLowerCase().match(/[\p{L}\p{N}_]+/gu));

/** The share of the query's words that a record holds. */
function similarity(query, record) {
  const held = words(record.content);
  return [...query].filter((word) => held.has(word)).length / query.size;
}

// --- the store

class Memory {
  #records = new Map();
  #path;

  constructor(path) {
    this.#path = path;
    if (path !== undefined && existsSync(path)) this.#replay();
  }

  get newestFirst() {
    return [...this.#records.values()].reverse();
  }

  get oldestFirst() {
    return [...this.#records.values()];
  }

  has(id) {
    return this.#records.has(id);
  }

  commit({ put = [], drop = [] }) {
    if (put.length + drop.length === 0) return;
    if (this.#path !== undefined) this.#append({ put, drop });
    this.#apply({ put, drop });
  }

  #apply({ put, drop }) {
    for (const record of put) this.#records.set(record.id, record);
    for (const id of drop) this.#records.delete(id);
  }

  #append(change) {
    const file = openSync(this.#path, 'a');
    try {
      writeFileSync(file, `${JSON.stringify(change)}\n`);
      fsyncSync(file);
    } finally {
      closeSync(file);
    }
  }

  #replay() {
    const bytes = readFileSync(this.#path);
    const end = bytes.lastIndexOf('\n') + 1;
    truncateSync(this.#path, end); // what follows the last newline was never acknowledged
    for (const line of bytes.toString('utf8', 0, end).split('\n')) {
      if (line !== '') this.#apply(JSON.parse(line));
    }
  }
}

// --- the methods

function methodsOf(memory, { whereOnTimeline }) {
  function accepted(entry) {
    if (!isObject(entry)) throw new A2MError(INVALID_PARAMS, 'records: expected objects');
    if ((entry.tier ?? undefined) !== undefined) {
      throw new A2MError(CAPABILITY_NOT_SUPPORTED, 'tier: this server does not implement tiers');
    }
    return {
      id: optional(entry, 'id', (id) => isString(id) && id !== '', 'a string that is not empty') ?? randomUUID(),
      content: required(entry, 'content', isString, 'a string'),
      created_at: new Date().toISOString(),
      role: optional(entry, 'role', isString, 'a string'),
      metadata: optional(entry, 'metadata', isMetadata, 'an object, at most 200 levels deep'),
      group: optional(entry, 'group', isString, 'a string'),
    };
  }

  const methods = {
    'memory/describe'(params) {
      const wanted = optional(params, 'protocol', isString, 'a string') ?? PROTOCOL;
      if (wanted !== PROTOCOL) throw new A2MError(PROTOCOL_NOT_SUPPORTED, `this server speaks ${PROTOCOL}`);
      return { protocol: PROTOCOL, name: 'core-only-node', capabilities: ['core'], methods: Object.keys(methods) };
    },

    'memory/remember'(params) {
      const records = required(params, 'records', Array.isArray, 'an array').map(accepted);
      const fresh = new Map();
      for (const record of records) {
        if (!memory.has(record.id) && !fresh.has(record.id)) fresh.set(record.id, record);
      }
      memory.commit({ put: [...fresh.values()] });
      return { ids: records.map(({ id }) => id) };
    },

    'memory/recall'(params) {
      const query = words(optional(params, 'query', isString, 'a string') ?? '');
      const where = optional(params, 'where', isObject, 'an object') ?? {};
      const limit = optional(params, 'limit', isCount, 'an integer of 0 or more') ?? 8;
      const least = optional(params, 'min_score', Number.isFinite, 'a number') ?? 0;
      const ranked = memory.newestFirst
        .filter((record) => matches(record, where))
        .map((record, age) => ({ ...record, score: query.size > 0 ? similarity(query, record) : 1 / (age + 1) }))
        .filter(({ score }) => score > 0 && score >= least)
        .sort((a, b) => b.score - a.score);
      return { records: limit === 0 ? ranked : ranked.slice(0, limit) };
    },

    'memory/timeline'(params) {
      const where = optional(params, 'where', isObject, 'an object') ?? {};
      const limit = optional(params, 'limit', isCount, 'an integer of 0 or more') ?? 0;
      const records = memory.oldestFirst
        .filter((record) => !whereOnTimeline || matches(record, where))
        .sort((a, b) => Date.parse(a.created_at) - Date.parse(b.created_at));
      return { records: records.slice(-limit) }; // all of them for 0
    },

    'memory/forget'(params) {
      const ids = optional(params, 'ids', isStrings, 'an array of strings');
      const where = optional(params, 'where', isObject, 'an object');
      const query = optional(params, 'query', isString, 'a string');
      for (const [name, capability] of [['tier', 'tiers'], ['key_prefix', 'keys']]) {
        if ((params[name] ?? undefined) !== undefined) {
          throw new A2MError(CAPABILITY_NOT_SUPPORTED, `${name}: this server does not implement ${capability}`);
        }
      }
      if (ids === undefined && where === undefined && query === undefined) {
        throw new A2MError(INVALID_PARAMS, 'expected at least one of ids, query and where');
      }
      const wanted = query === undefined ? undefined : words(query);
      if (wanted?.size === 0) throw new A2MError(INVALID_PARAMS, 'query: expected at least one word');
      const gone = memory.oldestFirst
        .filter(({ id }) => ids === undefined || ids.includes(id))
        .filter((record) => where === undefined || matches(record, where))
        .filter((record) => wanted === undefined || similarity(wanted, record) === 1);
      memory.commit({ drop: gone.map(({ id }) => id) });
      return { forgotten: gone.length };
    },
  };
  return methods;
}

// --- messages

function call(methods, { method, params }) {
  if (ELSEWHERE.has(method)) {
    throw new A2MError(CAPABILITY_NOT_SUPPORTED, `this server does not implement ${ELSEWHERE.get(method)}`);
  }
  if (!Object.hasOwn(methods, method)) throw new A2MError(METHOD_NOT_FOUND, `there is no method ${method}`);
  if (!isObject(params ?? {})) throw new A2MError(INVALID_PARAMS, 'params: expected an object');
  return methods[method](params ?? {});
}

function parsed(line) {
  let request;
  try {
    request = JSON.parse(line);
  } catch (error) {
    throw new A2MError(PARSE_ERROR, error.message);
  }
  if (!isObject(request)) throw new A2MError(INVALID_REQUEST, 'expected one request object; there are no batches');
  const { jsonrpc, id = null, method } = request;
  if (jsonrpc !== '2.0' || !isString(method) || !(id === null || isString(id) || typeof id === 'number')) {
    throw new A2MError(INVALID_REQUEST, 'expected "jsonrpc": "2.0", a method and an id that is a string or a number');
  }
  return request;
}

/** The response to one line, or undefined to a notification. */
function answer(methods, line) {
  let request = { id: null };
  let outcome;
  try {
    request = parsed(line);
    outcome = { result: call(methods, request) };
  } catch (error) {
    outcome = { error: { code: error instanceof A2MError ? error.code : INTERNAL_ERROR, message: error.message } };
  }
  return request.id === undefined ? undefined : { jsonrpc: '2.0', id: request.id, ...outcome };
}

/** The lines of a stream. node:readline would also end one at U+2028, which JSON has unescaped in strings. */
async function* linesOf(stream) {
  stream.setEncoding('utf8');
  let rest = '';
  for await (const chunk of stream) {
    const lines = (rest + chunk).split('\n');
    rest = lines.pop();
    yield* lines;
  }
  yield rest;
}

const { values: options } = parseArgs({
  options: { file: { type: 'string' }, 'where-on-timeline': { type: 'boolean', default: false } },
});
const methods = methodsOf(new Memory(options.file), { whereOnTimeline: options['where-on-timeline'] });
for await (const line of linesOf(process.stdin)) {
  if (line.trim() === '') continue;
  const response = answer(methods, line);
  if (response !== undefined) process.stdout.write(`${JSON.stringify(response)}\n`);
}
