// Runs in every page before its own scripts: time that stands still between actions, and the page as a list of items.
(() => {
  "use strict";
  // --- Time. Timers fire only in advance(), in order, so that a page does the same whenever it is asked and nobody waits.
  const START = Date.UTC(2016, 11, 15, 12);
  const RealDate = Date;
  const nextFrame = window.requestAnimationFrame.bind(window);
  const timers = new Map();
  let now = START;
  let nextTimer = 1;
  const later = (callback, delay, rest, every) => {
    const wait = Math.max(every ? 1 : 0, Number(delay) || 0);
    timers.set(nextTimer, { at: now + wait, callback, rest, every: every ? wait : null });
    return nextTimer++;
  };
  window.Date = new Proxy(RealDate, {
    construct: (target, given) => (given.length ? new target(...given) : new target(now)),
    apply: () => new RealDate(now).toString(),
    get: (target, key) => (key === "now" ? () => now : target[key]),
  });
  window.performance.now = () => now - START;
  window.setTimeout = (callback, delay, ...rest) => later(callback, delay, rest, false);
  window.setInterval = (callback, delay, ...rest) => later(callback, delay, rest, true);
  window.requestAnimationFrame = (callback) => later(() => callback(now - START), 16, [], false);
  window.clearTimeout = window.clearInterval = window.cancelAnimationFrame = (id) => timers.delete(id);
  const advance = (milliseconds) => {
    const until = now + milliseconds;
    for (let fired = 0; fired < 20000; fired++) {
      let first = null;
      for (const [id, timer] of timers) if (timer.at <= until && (first === null || timer.at < timers.get(first).at)) first = id;
      if (first === null) break;
      const timer = timers.get(first);
      now = timer.at;
      if (timer.every === null) timers.delete(first);
      else timer.at += timer.every;
      try {
        if (typeof timer.callback === "function") timer.callback(...timer.rest);
      } catch (error) {
        console.error(error);
      }
    }
    now = until;
  };
  // Nothing may leave the page or wait for somebody to close a box.
  window.alert = window.confirm = window.prompt = window.open = () => null;
  document.addEventListener("submit", (event) => event.preventDefault(), true);

  // --- What can be clicked: what listens. Elements below it are told, too.
  const listening = new WeakSet();
  const add = EventTarget.prototype.addEventListener;
  EventTarget.prototype.addEventListener = function (type, ...rest) {
    if (this instanceof Element && /^(click|mousedown|mouseup|pointerdown)$/.test(type)) listening.add(this);
    return add.call(this, type, ...rest);
  };
  const CONTROLS = new Set(["INPUT", "TEXTAREA", "SELECT", "BUTTON", "A"]);
  const HIDDEN = new Set(["query", "reward-display", "sync-task-cover", "click-canvas"]);
  const STATE = /(?:^|-)(active|selected|clicked|disabled|highlight|error)$/; // also "ui-state-disabled"
  const isClickable = (element) =>
    CONTROLS.has(element.tagName) || listening.has(element) || element.onclick !== null || element.isContentEditable;

  // --- References: numbers of elements, given when they are first seen.
  let references = new Map();
  let numbers = new WeakMap();
  const refer = (element) => {
    if (!numbers.has(element)) {
      numbers.set(element, references.size + 1);
      references.set(references.size + 1, element);
    }
    return numbers.get(element);
  };

  const clean = (text) => text.replace(/\s+/g, " ").trim();
  // Icons are images of the style sheet. A page does not wait for them, and without them they have no size.
  const loaded = new Set();
  const icons = async () => {
    const found = new Set();
    for (const element of document.querySelectorAll("#area *")) {
      const address = /^url\("(.*)"\)/.exec(getComputedStyle(element).content);
      if (address && !loaded.has(address[1])) found.add(address[1]);
    }
    if (!found.size) return;
    await Promise.all([...found].map((address) => {
      const image = new Image();
      image.src = address;
      loaded.add(address);
      return image.decode().catch(() => {});
    }));
    for (let frame = 0; frame < 2; frame++) await new Promise(nextFrame);
  };
  const isVisible = (element) => {
    const box = element.getBoundingClientRect();
    return box.width > 1 && box.height > 1 && element.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  };
  const iconName = (element) =>
    clean(element.getAttribute("aria-label") || element.title || element.alt || [...element.classList].filter((name) => !STATE.test(name)).join(" ") || element.id);
  // Classes of an element and of what holds nothing else: the number of the current page is a link in a list item that is "active".
  const classStates = (element) => {
    const states = [...element.classList].map((name) => STATE.exec(name)).filter(Boolean).map((match) => match[1]);
    const holder = element.parentElement;
    const isAlone = holder.childElementCount === 1 && clean(holder.textContent) === clean(element.textContent);
    return isAlone && holder !== document.body ? [...states, ...classStates(holder)] : states;
  };
  const statesOf = (element) => {
    const states = [];
    // jQuery UI says of a list's item that it is selected, and of a heading that it is expanded; the link is within the item.
    for (const [attribute, state] of [["aria-selected", "selected"], ["aria-expanded", "expanded"]])
      if (element.closest(`[${attribute}=true]`) && CONTROLS.has(element.tagName) === (attribute === "aria-selected"))
        states.push(state);
    states.push(...classStates(element).filter((state) => state !== "active" || !states.length));
    if (element.disabled) states.push("disabled");
    if (element.checked) states.push("checked");
    if (element === document.activeElement) states.push("focused");
    return [...new Set(states)];
  };
  const describe = (element, name) => {
    const item = { ref: refer(element), kind: "", name, id: element.id, states: statesOf(element) };
    const tag = element.tagName;
    if (tag === "INPUT") item.kind = /^(submit|reset|button)$/.test(element.type) ? "button" : element.type;
    else if (tag === "A" || element.classList.contains("alink")) item.kind = "link";
    else if (CONTROLS.has(tag)) item.kind = tag.toLowerCase();
    if (tag === "TEXTAREA" || (tag === "INPUT" && !/^(button|checkbox|radio)$/.test(item.kind))) item.value = element.value;
    if (tag === "SELECT") {
      item.options = [...element.options].map((option) => clean(option.text));
      item.value = [...element.selectedOptions].map((option) => clean(option.text)).join(", ");
      item.many = element.multiple;
    }
    return item;
  };
  const nameOf = (element) => {
    if (element.tagName === "INPUT" && /^(submit|reset|button)$/.test(element.type)) return element.value;
    if (element.tagName === "INPUT" && /^(checkbox|radio)$/.test(element.type))
      return clean([...element.labels].map((label) => label.innerText).join(" "));
    if (/^(INPUT|TEXTAREA)$/.test(element.tagName)) return element.placeholder;
    return clean(element.innerText) || iconName(element);
  };

  // Items of an element in reading order; null is the end of a line.
  const walk = (element, inClickable) => {
    if (HIDDEN.has(element.id) || /^(SCRIPT|STYLE|OPTION|CANVAS)$/.test(element.tagName) || !isVisible(element)) return [];
    const clickable = inClickable || (element !== document.body && isClickable(element));
    if (/^(INPUT|TEXTAREA|SELECT|BUTTON)$/.test(element.tagName)) return [describe(element, nameOf(element))];
    let items = [];
    for (const child of element.childNodes) {
      if (child.nodeType === Node.TEXT_NODE) {
        const text = clean(child.data);
        if (text) items.push({ kind: "", name: text, states: [] });
      } else if (child.nodeName === "BR") items.push(null);
      else if (child instanceof Element) items.push(...walk(child, clickable));
    }
    if (element.tagName === "LABEL" && items.some((item) => item && /^(checkbox|radio)$/.test(item.kind)))
      items = items.filter((item) => item && item.ref);
    if (clickable && !items.some((item) => item && item.ref)) {
      const text = items.filter(Boolean).map((item) => item.name).join(" ");
      if (text || listening.has(element) || CONTROLS.has(element.tagName)) items = [describe(element, text || iconName(element))];
    }
    const display = getComputedStyle(element).display;
    if (/^(inline-block|table-cell|table-row)$/.test(display)) items = items.filter(Boolean);
    if (items.length && /^(block|flex|grid|list-item|table-row|table)$/.test(display)) items = [null, ...items, null];
    return items;
  };
  const read = () => {
    const lines = [[]];
    for (const item of walk(document.body, false)) {
      if (item) lines[lines.length - 1].push(item);
      else if (lines[lines.length - 1].length) lines.push([]);
    }
    return {
      instruction: clean(document.getElementById("query").innerText),
      done: WOB_DONE_GLOBAL,
      reward: WOB_RAW_REWARD_GLOBAL,
      lines: lines.filter((line) => line.length),
    };
  };

  // --- Actions. Each returns what is in its way, in words, as {complaint: ...}.
  const target = (ref) => {
    const element = references.get(ref);
    if (!element) return { complaint: `There is no [${ref}] on this page.` };
    if (!element.isConnected || !isVisible(element)) return { complaint: `[${ref}] is gone from this page.` };
    if (statesOf(element).includes("disabled")) return { complaint: `[${ref}] is disabled.` };
    return { element };
  };
  const locate = (ref) => {
    const found = target(ref);
    if (found.complaint) return found;
    found.element.scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" });
    // The middle, or else whatever is not covered: things overlap.
    for (const across of [0.5, 0.1, 0.3, 0.7, 0.9])
      for (const down of [0.5, 0.1, 0.3, 0.7, 0.9])
        for (const box of found.element.getClientRects()) {
          const place = { x: box.left + box.width * across, y: box.top + box.height * down };
          const hit = document.elementFromPoint(place.x, place.y);
          if (hit && (found.element.contains(hit) || hit.contains(found.element))) return place;
        }
    return { complaint: `[${ref}] is covered by something else.` };
  };
  const prepareTyping = (ref, text) => {
    const found = target(ref);
    if (found.complaint) return found;
    const element = found.element;
    const isText = element.tagName === "TEXTAREA" || (element.tagName === "INPUT" && !/^(button|submit|reset|checkbox|radio|file)$/.test(element.type));
    if (!isText || element.readOnly) return { complaint: `Nothing can be typed into [${ref}].` };
    element.focus();
    if (!/^(date|time|month|week|datetime-local|color|range)$/.test(element.type)) {
      element.select();
      return { insert: true, empty: element.value === "" };
    }
    element.value = text;
    for (const type of ["input", "change"]) element.dispatchEvent(new Event(type, { bubbles: true }));
    const example = { date: "2016-12-31", time: "23:59" }[element.type];
    return element.value === text || !example ? {} : { complaint: `[${ref}] takes a ${element.type} as in "${example}".` };
  };
  const choose = (ref, texts) => {
    const found = target(ref);
    if (found.complaint) return found;
    const element = found.element;
    if (element.tagName !== "SELECT") return { complaint: `[${ref}] has no options.` };
    if (texts.length > 1 && !element.multiple) return { complaint: `One option of [${ref}] can be selected at a time.` };
    const options = [...element.options];
    const chosen = texts.map((text) => options.find((option) => clean(option.text) === clean(text)));
    const missing = texts.find((_, index) => !chosen[index]);
    if (missing !== undefined) return { complaint: `[${ref}] has no option "${missing.slice(0, 80)}".` };
    for (const option of options) option.selected = chosen.includes(option);
    for (const type of ["input", "change"]) element.dispatchEvent(new Event(type, { bubbles: true }));
    return {};
  };
  const scroll = (ref, direction) => {
    let element = document.getElementById("area");
    if (ref !== null) {
      const found = target(ref);
      if (found.complaint) return found;
      element = found.element;
    }
    while (element && element.scrollHeight <= element.clientHeight + 1) element = element.parentElement;
    (element || document.scrollingElement).scrollBy({ top: direction * 150, behavior: "instant" });
    return {};
  };
  const settle = async (milliseconds) => {
    advance(milliseconds);
    await icons();
    return read();
  };
  const begin = async (seed) => {
    references = new Map();
    numbers = new WeakMap();
    if (window.jQuery) window.jQuery.fx.off = true;
    Math.seedrandom(seed);
    core.EPISODE_MAX_TIME = 1e12;
    core.startEpisodeReal();
    return settle(1000);
  };
  window.rllibPage = { settle, locate, prepareTyping, choose, scroll, begin };
})();
