"use strict";
// Keeps a page up to date: asks for it again, swaps the parts that changed, and has the charts drawn from the API's JSON.
// With an API key the first page is empty: the key is asked for, kept in this tab, and sent with every request.
(() => {
  const KEY = "cukiln-api-key";
  const HIDDEN_MS = 1000;

  function get(url, key = sessionStorage.getItem(KEY)) {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    return fetch(url, { headers, cache: "no-store", credentials: "omit" });
  }

  async function json(url) {
    const answer = await get(url);
    if (!answer.ok) throw new Error(`${url}: ${answer.status}`);
    return answer.json();
  }

  const main = () => document.getElementById("main");
  const parsed = (text) => new DOMParser().parseFromString(text, "text/html");

  async function drawOverview() {
    const part = document.getElementById("part").value;
    const [byOperator, byDay] = await Promise.all([json("/v1/timings?by=operator"), json("/v1/timings?by=day")]);
    cukiln.operators(byOperator.timings, part);
    cukiln.days(byDay.timings, part);
    if (document.getElementById("phases-details").open) cukiln.phases(byOperator.timings);
    document.querySelector(".controls").hidden = false;
  }

  async function drawJob() {
    const url = `/v1/jobs/${main().dataset.job}`;
    const [job, timeline] = await Promise.all([json(url), json(`${url}/timeline`)]);
    cukiln.stages(job);
    cukiln.timeline(timeline);
  }

  const draws = { overview: drawOverview, job: drawJob };

  /** The charts are an addition: without them the tables stand. */
  async function draw() {
    try {
      await draws[main().dataset.page]?.();
      main().dataset.drawn = Number(main().dataset.drawn ?? 0) + 1;
    } catch (error) {
      console.warn("the charts are not drawn:", error.message);
    }
  }

  /** Swaps what changed; where the reader is, what is open and what is selected stays. */
  async function refresh() {
    const answer = await get(location.href);
    if (!answer.ok) return;
    const fresh = parsed(await answer.text());
    let changed = false;
    for (const part of document.querySelectorAll("[data-live]")) {
      const next = fresh.getElementById(part.id);
      if (!next || next.innerHTML === part.innerHTML) continue;
      const focused = part.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
      part.replaceChildren(...next.childNodes);
      if (focused) part.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus();
      changed = true;
    }
    main().dataset.poll = fresh.getElementById("main").dataset.poll ?? "0";
    if (changed) await draw();
  }

  async function follow() {
    for (let wait; (wait = Number(main().dataset.poll ?? 0)); ) {
      await new Promise((done) => setTimeout(done, wait));
      while (document.hidden) await new Promise((done) => setTimeout(done, HIDDEN_MS));
      try {
        await refresh();
      } catch {
        // The service is away: the page keeps what it has and asks again.
      }
    }
  }

  async function begin() {
    document.getElementById("part")?.addEventListener("change", draw);
    document.getElementById("phases-details")?.addEventListener("toggle", draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    await draw();
    await follow();
  }

  /** The page with its data, in place of the form; false where the service does not take the key. */
  async function show(key) {
    const answer = await get(location.href, key).catch(() => null); // a key that no header can hold
    if (!answer || answer.status === 401) return false;
    const fresh = parsed(await answer.text());
    const page = fresh.getElementById("main");
    if (!page) return false; // no page of ours: the service is away, or something between us answers for it
    sessionStorage.setItem(KEY, key);
    document.title = fresh.title;
    main().replaceWith(document.adoptNode(page));
    begin();
    return true;
  }

  async function askForKey(form) {
    const known = sessionStorage.getItem(KEY);
    if (known && (await show(known))) return;
    sessionStorage.removeItem(KEY);
    form.hidden = false;
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const wrong = document.getElementById("key-error");
      wrong.hidden = true;
      if (!(await show(document.getElementById("key").value))) wrong.hidden = false;
    });
  }

  const form = document.getElementById("key-form");
  if (form) askForKey(form);
  else begin();
})();
