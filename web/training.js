/**
 * The panel of TrainStep: the loss while it trains, held-out loss, learning rate, speed, memory, previews, and a Stop
 * button that keeps the state.
 *
 * It follows the pack's events: `graft.step` {node, run, step, until, loss, rate, norm, validation, average, speed, left,
 * memory} (held-out loss of the weights and of their average, steps per second, seconds, bytes) and `graft.preview` {node, run, step, pictures: [{filename, subfolder, type,
 * label}]}; `node` is an execution id. The workflow keeps the last run as the property `graft run`, so that the curve of
 * a finished run comes back from the store.
 */
import { Series, Smoothed, draw } from './chart.js'
import { duration, el, short, size } from './dom.js'
import { addPanel, api, asked, chain, everyNode, fit, nodeOf, roomOf, whenWide, widen } from './editor.js'
import { onSetting, setting } from './settings.js'
import { t } from './texts.js'

const PROPERTY = 'graft run'
const CHART_HEIGHT = 150
const COLORS = { loss: '#4c8dd6', smooth: '#e2923b', validation: '#3fa96b', average: '#c9588f', rate: '#b07cc6' }
const CURVES = {
  loss: 'loss',
  smooth: 'smoothed',
  validation: 'held out',
  average: 'held out, average',
  rate: 'learning rate',
}
const panels = new WeakMap()

/** Give a TrainStep node its panel. */
export function addTrainingPanel(node) {
  const panel = new Panel(node)
  panels.set(node, panel)
  addPanel(node, 'training', panel.content)
  widen(node, 340)
  chain(node, 'onConfigure', () => panel.restore())
  setTimeout(() => panel.restore()) // a graph that is loaded may have configured its nodes by now
  chain(node, 'onExecuted', (output) => panel.finished(output))
  whenWide(panel.content, () => panel.redraw())
}

/** Keep the seed of a new Start Training: the editor would draw another after each queueing, which is another run. */
export function keepSeed(node) {
  const control = node.widgets?.find((widget) => widget.name === 'control_after_generate')
  if (control) control.value = 'fixed'
}

/** Listen to the pack's events, once. */
export function listen() {
  const of = (event) => panels.get(nodeOf(event.detail.node))
  api.addEventListener('graft.step', (event) => of(event)?.step(event.detail))
  api.addEventListener('graft.preview', (event) => of(event)?.preview(event.detail))
  for (const name of ['execution_error', 'execution_interrupted']) {
    api.addEventListener(name, (event) =>
      panels.get(nodeOf(event.detail.node_id))?.ended(name === 'execution_error' ? 'error' : 'interrupted'),
    )
  }
  api.addEventListener('reconnected', () => everyNode((node) => panels.get(node)?.restore()))
  onSetting('Graft.Training.Smoothing', (weight) => everyNode((node) => panels.get(node)?.smoothen(weight)))
}

class Panel {
  constructor(node) {
    this.node = node
    this.loss = new Series()
    this.smooth = new Smoothed(setting('Graft.Training.Smoothing'))
    this.validation = new Series()
    this.average = new Series() // the held-out loss of the running average
    this.rate = new Series()
    this.shown = new Set(['loss', 'smooth', 'validation', 'average'])
    this.pictures = []
    this.said = {}
    this.status = el(
      'div',
      { class: 'graft-status', role: 'status' },
      el('span', { class: 'graft-dim' }, t('The loss curve appears here during training.')),
    )
    this.canvas = el('canvas', { class: 'graft-chart', role: 'img', 'aria-label': t('Loss by step') })
    this.switches = Object.fromEntries(Object.keys(CURVES).map((name) => [name, this.switch(name)]))
    this.legend = el('div', { class: 'graft-legend' }, ...Object.values(this.switches))
    this.stop = el(
      'button',
      {
        class: 'graft-button graft-stop',
        type: 'button',
        title: t('Stop after the current step and continue the workflow with the state so far'),
        onclick: () => this.askToStop(),
      },
      t('Stop and keep'),
    )
    this.strip = el('div', { class: 'graft-pictures' })
    this.stop.hidden = this.canvas.hidden = this.legend.hidden = true
    this.content = el('div', { class: 'graft-content' }, this.status, this.canvas, this.legend, this.stop, this.strip)
  }

  switch(name) {
    const box = el('input', { type: 'checkbox', checked: this.shown.has(name) })
    box.addEventListener('change', () => {
      if (box.checked) this.shown.add(name)
      else this.shown.delete(name)
      this.redraw()
    })
    return el('label', {}, box, el('span', { style: `--curve: ${COLORS[name]}` }, t(CURVES[name])))
  }

  /** One step of training: an event. */
  step(data) {
    if (this.run !== data.run) this.clear()
    else if (data.step <= this.said.step) this.forget(data.step)
    if (this.said.state !== 'running') this.first = data.step
    this.run = data.run
    this.drawnKey = undefined
    this.add(data)
    const { validation, average } = this.said
    this.said = { ...this.said, ...data, state: 'running' }
    this.said.validation = data.validation ?? validation
    this.said.average = data.average ?? average
    this.changed()
  }

  add({ step, loss, rate, validation, average }) {
    this.loss.add(step, loss)
    this.smooth.add(step, loss)
    if (Number.isFinite(rate)) this.rate.add(step, rate)
    if (Number.isFinite(validation)) this.validation.add(step, validation)
    if (Number.isFinite(average)) this.average.add(step, average)
  }

  smoothen(weight) {
    this.smooth = new Smoothed(weight)
    this.loss.steps.forEach((step, index) => this.smooth.add(step, this.loss.values[index]))
    this.changed()
  }

  clear() {
    for (const series of [this.loss, this.smooth, this.validation, this.average, this.rate]) series.clear()
    this.pictures = []
    this.said = {}
    this.strip.replaceChildren()
  }

  /** The run starts over or went back: forget the losses from this step on (and before the first). */
  forget(step) {
    const from = step > 1 ? step : 0
    for (const series of [this.validation, this.average]) {
      while (series.last.step >= from) series.drop()
    }
    this.said.validation = this.validation.last.value
    this.said.average = this.average.last.value
    this.pictures = this.pictures.filter((picture) => picture.step < from)
    this.showPictures()
  }

  preview({ step, pictures }) {
    this.pictures.push(...pictures.map((picture) => ({ ...picture, step })))
    this.pictures.splice(0, Math.max(0, this.pictures.length - setting('Graft.Training.Previews')))
    this.showPictures()
    this.changed()
  }

  showPictures() {
    this.strip.replaceChildren(
      ...this.pictures.map((picture) => {
        const query = new URLSearchParams({
          filename: picture.filename,
          subfolder: picture.subfolder ?? '',
          type: picture.type,
        })
        const label = [t('step {step}', { step: picture.step }), picture.label ? t(picture.label) : '']
          .filter(Boolean)
          .join(', ')
        return el(
          'figure',
          {},
          el('img', {
            src: api.apiURL(`/view?${query}`),
            alt: t('Preview, {label}', { label }),
            onload: () => this.refit(),
          }),
          el('figcaption', {}, label),
        )
      }),
    )
  }

  /** The node is done: remember what it trained, and draw all of it from the store. */
  finished(output) {
    const result = output?.graft_run?.[0]
    this.said.state = 'done'
    if (result) {
      this.node.properties[PROPERTY] = { run: result.run, key: result.key, until: result.until }
      this.restore()
    }
    this.changed()
  }

  /** An error or the editor's own Cancel ended the run: say what is kept of it. */
  async ended(how) {
    this.said.state = how
    this.said.kept = undefined
    this.changed()
    const { run, said } = this
    if (said.step === undefined) return
    let states
    try {
      ;({ states } = await asked(`/graft/runs/${encodeURIComponent(run)}`))
    } catch {
      return // nothing of the run is stored
    }
    if (this.said !== said) return // the next run began meanwhile
    const newest = states.reduce((last, state) => (last && last.changed > state.changed ? last : state), null)
    if (newest?.step > said.step || newest?.step < this.first) return // of an earlier run of this name
    this.said.kept = newest?.step
    this.changed()
  }

  /** Draw a stored run again: after a reload of the page, or when a saved workflow is opened. */
  async restore() {
    const { run, key, until } = this.node.properties?.[PROPERTY] ?? {}
    const shown = `${key} ${until}`
    if (!run || !key || shown === this.drawnKey) return
    const live = this.drawnKey === undefined // no other state of the store is drawn: the pictures came while it ran
    this.drawnKey = shown
    let stored
    try {
      stored = await asked(`/graft/runs/${encodeURIComponent(run)}/${encodeURIComponent(key)}`)
    } catch (error) {
      this.drawnKey = undefined
      if (!this.loss.steps.length) this.sayGone(run, error)
      this.refit()
      return
    }
    if (this.drawnKey !== shown) return // the next run began meanwhile
    this.showStored(run, stored, live ? this.pictures : [])
    if (until > stored.step) this.said = { ...this.said, until, state: 'stopped' }
  }

  /** Say that a run is not in the store any more. */
  sayGone(run, error) {
    const text = t('The run “{run}” is no longer stored: {error}', { run, error: error.message })
    this.status.replaceChildren(el('span', { class: 'graft-dim' }, text))
  }

  /** Draw a run as the store has it; `pictures` are shown where the store has no previews. */
  showStored(run, { history, step, previews }, pictures) {
    this.clear()
    this.run = run
    history.loss.forEach((loss, index) => this.add({ step: index + 1, loss, rate: history.rate[index] }))
    for (const [at, loss] of history.validation) this.validation.add(at, loss) // ascending; 0 is before the first step
    for (const [at, loss] of history.average_validation ?? []) this.average.add(at, loss)
    this.said = {
      run,
      step,
      until: step,
      loss: this.loss.last.value,
      rate: this.rate.last.value,
      validation: this.validation.last.value,
      average: this.average.last.value,
      state: 'done',
    }
    this.pictures = []
    for (const picture of previews?.length ? previews : pictures) {
      this.preview({ step: picture.step, pictures: [picture] })
    }
    this.changed()
  }

  async askToStop() {
    this.stop.disabled = true
    this.stop.textContent = t('Stopping …')
    try {
      await asked(`/graft/stop?run=${encodeURIComponent(this.run)}`, { method: 'POST' })
    } catch (error) {
      this.stop.disabled = false
      this.stop.textContent = t('Stop and keep')
      this.status.append(el('span', { class: 'graft-problem' }, t('Could not stop: {error}', { error: error.message })))
    }
  }

  /** Draw at most once a frame, whatever the number of events. */
  changed() {
    if (this.waiting) return
    this.waiting = true
    requestAnimationFrame(() => {
      this.waiting = false
      this.tell()
      this.redraw()
      this.refit()
    })
  }

  tell() {
    const { step, until, loss, rate, validation, average, speed, left, memory, state } = this.said
    if (step === undefined) return
    const running = state === 'running'
    const ending = this.ending()
    const facts = [
      [t('step'), running ? t('{step} of {until}', { step, until }) : String(step)],
      [t('loss'), short(this.smooth.last.value ?? loss)],
      [t('held out'), Number.isFinite(validation) ? short(validation) : null],
      [t('average'), Number.isFinite(average) ? short(average) : null],
      [t('rate'), short(rate)],
      [t('it/s'), running ? short(speed) : null],
      [t('left'), running ? duration(left) : null],
      [t('memory'), Number.isFinite(memory) && running ? size(memory) : null],
    ].filter(([, value]) => value !== null)
    this.status.replaceChildren(...facts.map(([name, value]) => el('span', {}, `${name} `, el('b', {}, value))))
    if (ending) this.status.append(el('span', { class: 'graft-ending' }, ending))
    this.stop.hidden = !running
    if (!running) {
      this.stop.disabled = false
      this.stop.textContent = t('Stop and keep')
    }
    this.canvas.hidden = this.legend.hidden = !this.loss.steps.length
    this.switches.average.hidden = !this.average.steps.length
  }

  /** How the run ended before its last step, what is kept and what to do next; empty when it did not. */
  ending() {
    const { step, until, state, kept } = this.said
    if (state === 'stopped') return t('stopped at {step} of {until}, kept; Run continues', { step, until })
    const how = { interrupted: t('interrupted'), error: t('stopped by an error') }[state]
    if (!how || kept === undefined) return how ?? ''
    return `${how}; ${t('step {step} is kept, Run continues from there', { step: kept })}`
  }

  redraw() {
    if (this.canvas.hidden) return
    const width = this.content.clientWidth || this.node.size[0] - 24
    this.canvas.style.height = `${CHART_HEIGHT}px`
    const curves = [
      { name: 'loss', series: this.loss, color: `${COLORS.loss}88`, width: 1 },
      { name: 'smooth', series: this.smooth, color: COLORS.smooth, width: 2 },
      { name: 'validation', series: this.validation, color: COLORS.validation, width: 2, dots: true },
      { name: 'average', series: this.average, color: COLORS.average, width: 2, dots: true },
    ].filter((curve) => this.shown.has(curve.name))
    if (this.shown.has('rate')) curves.push(this.scaledRate())
    draw(this.canvas, width, CHART_HEIGHT, curves, (value) => short(value, 2))
  }

  /** The learning rate in the chart's own range: its shape, with its value in the line above. */
  scaledRate() {
    const most = (values) => values.reduce((high, value) => (value > high ? value : high), 0) || 1
    const factor = most(this.smooth.values) / most(this.rate.values)
    const series = new Series()
    this.rate.steps.forEach((step, index) => series.add(step, this.rate.values[index] * factor))
    return { series, color: COLORS.rate, width: 1 }
  }

  refit() {
    requestAnimationFrame(() => {
      const height = roomOf(this.content)
      if (height === this.drawnHeight || !this.node.graph) return
      this.drawnHeight = height
      fit(this.node)
    })
  }
}
