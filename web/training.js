/**
 * The panel of TrainStep: the loss while it trains, held-out loss, learning rate, speed, memory, previews, a Stop
 * button that keeps the state, and buttons that sample or save now.
 *
 * It follows the pack's events. Each has {node, workflow, run, key, until, can}: an execution id, the id of the workflow,
 * the state that the step leads to, and what it can be asked for. `graft.step` adds {step, loss, rate, norm, validation, average, speed, left, memory[, saving, settings]}
 * (held-out loss of the weights and of their average, steps per second, seconds, bytes) and for preference pairs
 * {accuracy} (the implicit accuracy on held-out pairs, a share), `graft.preview` {step, pictures:
 * [{filename, subfolder, type, label, prompt, text}]}, `graft.saved` {step} when it saved its state as asked, and `graft.end` {ended, result}, for pages that have not queued the
 * workflow. What a page has missed of a step that runs comes from the server. The workflow keeps the last run as the
 * property `graft run`, so that its curve comes back from the store.
 */
import * as appMode from './app_mode.js'
import { Series, Smoothed, draw } from './chart.js'
import { curveTable, saveText } from './curve_table.js'
import { duration, el, short, size } from './dom.js'
import { addPanel, api, app, asked, chain, everyNode, nodeOf, posted, remember, roomOf, widen } from './editor.js'
import { Gallery, Previews } from './gallery.js'
import { openOverlay } from './overlay.js'
import { Plot } from './plot.js'
import { onSetting, setting } from './settings.js'
import { fitShown, offer } from './subgraph_panels.js'
import { t } from './texts.js'

const PROPERTY = 'graft run'
const CHART_HEIGHT = 150 // at least
const COLORS = {
  loss: '#4c8dd6',
  smooth: '#c77520',
  validation: '#369960',
  average: '#c9588f',
  accuracy: '#8a8f2a',
  rate: '#aa76c2',
}
const CURVES = {
  loss: 'loss',
  smooth: 'smoothed',
  validation: 'held out',
  average: 'held out, average',
  accuracy: 'implicit accuracy',
  rate: 'learning rate',
}
// What is said of a saving that was taken when memory ran out.
const SAVINGS = {
  'gradient checkpointing on': 'gradient checkpointing on',
  'offload to CPU memory optimizer': 'offload to CPU memory optimizer',
  'offload to CPU memory layers': 'offload to CPU memory layers',
}
const twoDigits = (value) => short(value, 2)
const panels = new WeakMap()
const noted = new Set() // what is kept once a page: after an undo it is not kept again, which would end the redo

let asking = null

/** The training steps that run now: one request for all panels that ask at once. */
function callsNow() {
  asking ??= asked('/graft/running')
    .then((answer) => answer.running)
    .finally(() => (asking = null))
  return asking
}

/** Give a TrainStep node its panel. */
export function addTrainingPanel(node) {
  const panel = new Panel(node)
  panels.set(node, panel)
  const spare = () => panel.spare()
  addPanel(node, 'training', panel.content, spare)
  offer(node, panel.content, { spare, moved: () => panel.moved() })
  widen(node, 340)
  chain(node, 'onConfigure', () => panel.restore())
  setTimeout(() => panel.restore()) // a graph that is loaded may have configured its nodes by now
  chain(node, 'onExecuted', (output) => panel.finished(output))
}

/** Keep the seed of a new Start Training: the editor would draw another after each queueing, which is another run. */
export function keepSeed(node) {
  const control = node.widgets?.find((widget) => widget.name === 'control_after_generate')
  if (control) control.value = 'fixed'
}

/** Listen to the pack's events, once. */
export function listen() {
  appMode.listen()
  const of = ({ detail }) => {
    const panel = panels.get(nodeOf(detail.node))
    return panel?.owns(detail) ? panel : undefined
  }
  api.addEventListener('graft.step', (event) => of(event)?.step(event.detail))
  api.addEventListener('graft.preview', (event) => of(event)?.preview(event.detail))
  api.addEventListener('graft.saved', (event) => of(event)?.saved(event.detail))
  api.addEventListener('graft.end', (event) => of(event)?.end(event.detail))
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
    this.accuracy = new Series() // on held-out preference pairs
    this.rate = new Series()
    this.norm = new Series() // of the gradients: only in the table
    this.shown = new Set(['loss', 'smooth', 'validation', 'average', 'accuracy'])
    this.said = {}
    this.isLog = this.isFull = false
    this.status = el(
      'div',
      { class: 'graft-status', role: 'status' },
      el('span', { class: 'graft-dim' }, t('The loss curve appears here during training.')),
    )
    this.plot = new Plot(
      t('Loss by step'),
      (step) => this.describe(step),
      () => this.redraw(),
    )
    this.canvas = this.plot.element
    this.switches = Object.fromEntries(Object.keys(CURVES).map((name) => [name, this.switch(name)]))
    this.log = this.option(t('log scale'), (on) => (this.isLog = on))
    this.full = this.option(t('full range'), (on) => (this.isFull = on))
    this.full.title = t('Also show the few values that would flatten the curve')
    this.large = el(
      'button',
      { class: 'graft-icon graft-large', type: 'button', title: t('Full size'), 'aria-label': t('Full size') },
      '⤢',
    )
    this.large.addEventListener('click', () => this.enlarge())
    const save = el('button', { class: 'graft-button', type: 'button', title: t('Save the curves as a table') }, 'CSV')
    save.addEventListener('click', () => this.saveTable())
    const ends = el('span', { class: 'graft-ends' }, save, this.large)
    this.legend = el('div', { class: 'graft-legend' }, ...Object.values(this.switches), this.log, this.full, ends)
    this.asks = { sample: this.ask('sample', t('Sample now')), save: this.ask('save', t('Save now')) }
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
    this.previews = new Previews()
    this.gallery = new Gallery(this.previews, () => this.refit())
    this.asks.save.title = t('Keep the state of this step: ask for that many steps to get it')
    this.actions = el('div', { class: 'graft-actions' }, this.stop, ...Object.values(this.asks))
    this.actions.hidden = this.canvas.hidden = this.legend.hidden = this.full.hidden = true
    this.inner = el(
      'div',
      { class: 'graft-content' },
      this.status,
      this.canvas,
      this.legend,
      this.actions,
      this.gallery.element,
    )
    this.content = el('div', { class: 'graft-content graft-trained' }, this.inner)
  }

  /** How many pixels the chart is taller than it must be. */
  spare() {
    return this.canvas.hidden || this.isLarge ? 0 : Math.max(0, this.canvas.offsetHeight - CHART_HEIGHT)
  }

  /** Show the whole panel over the page, and put it back into the node when that is closed. */
  enlarge() {
    if (this.isLarge) return
    this.isLarge = true
    this.content.style.minHeight = `${this.content.offsetHeight}px`
    this.large.hidden = true
    openOverlay(this.node.title, this.inner, () => {
      this.isLarge = this.large.hidden = false
      this.content.append(this.inner)
      this.content.style.minHeight = ''
      this.changed()
    })
    this.changed()
  }

  /** A button that asks the running step for something besides its training. */
  ask(what, label) {
    const button = el('button', { class: 'graft-button', type: 'button', 'data-ask': what }, label)
    button.addEventListener('click', async () => {
      button.disabled = true
      try {
        await posted(`/graft/${what}?run=${encodeURIComponent(this.run)}`, {})
      } catch (error) {
        button.disabled = false
        this.status.append(
          el('span', { class: 'graft-problem' }, t('Could not ask: {error}', { error: error.message })),
        )
      }
    })
    return button
  }

  option(label, act) {
    const box = el('input', { type: 'checkbox' })
    box.addEventListener('change', () => {
      act(box.checked)
      this.redraw()
    })
    return el('label', {}, box, el('span', { class: 'graft-plain' }, label))
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

  /** Whether an event is this panel's: of its workflow, or of the run that it has kept before that was saved as another. */
  owns({ node, workflow, key }) {
    if (nodeOf(node) !== this.node) return false
    return !workflow || workflow === (app.rootGraph ?? app.graph).id || this.node.properties?.[PROPERTY]?.key === key
  }

  /** One step of training: an event. */
  step(data) {
    if (this.run !== data.run) this.clear()
    else if (data.step <= this.said.step) this.forget(data.step)
    if (this.said.state !== 'running') this.first = data.step
    const isNew = data.key !== this.key
    this.run = data.run
    this.key = data.key
    this.drawnKey = undefined
    this.note(data)
    const last = this.loss.last.step ?? 0
    if (data.key && data.step > 1 && (isNew || data.step > last + 1)) this.catchUp(data)
    this.missed?.push(data)
    this.take(data)
    this.changed()
  }

  /** Keep in the workflow which state this run leads to: with it the store finds its snapshots. */
  note({ node, run, key, until }) {
    const name = `${node} ${key}`
    if (!key || noted.has(name)) return
    noted.add(name)
    remember(this.node, PROPERTY, { run, key, until })
  }

  take(data) {
    this.add(data)
    const { validation, average, accuracy } = this.said
    this.said = { ...this.said, ...data, state: 'running' }
    this.said.validation = data.validation ?? validation
    this.said.average = data.average ?? average
    this.said.accuracy = data.accuracy ?? accuracy
  }

  /** Draw all of a step that runs, also what this page has not been told of. */
  async catchUp({ run, key }) {
    if (this.catching === key) return
    this.catching = key
    this.missed = []
    let live
    try {
      live = await asked(`/graft/runs/${encodeURIComponent(run)}/live`)
    } catch {
      return // it has just ended; the store has it
    } finally {
      if (this.catching === key && live?.key !== key) this.catching = this.missed = undefined
    }
    if (this.catching !== key || live.key !== key) return // it ended meanwhile, or the next has begun
    const { missed } = this
    this.catching = this.missed = undefined
    this.key = key
    this.drawnKey = undefined
    this.showStored(run, live, [])
    this.said = { ...this.said, ...live, validation: this.validation.last.value, state: 'running' }
    this.said.average = this.average.last.value
    this.said.accuracy = this.accuracy.last.value
    for (const data of missed) if (data.step > live.step) this.take(data)
    this.note(live)
    this.changed()
  }

  add({ step, loss, rate, norm, validation, average, accuracy }) {
    this.loss.add(step, loss)
    this.smooth.add(step, loss)
    if (Number.isFinite(rate)) this.rate.add(step, rate)
    if (Number.isFinite(norm)) this.norm.add(step, norm)
    if (Number.isFinite(validation)) this.validation.add(step, validation)
    if (Number.isFinite(average)) this.average.add(step, average)
    if (Number.isFinite(accuracy)) this.accuracy.add(step, accuracy)
  }

  smoothen(weight) {
    this.smooth = new Smoothed(weight)
    this.loss.steps.forEach((step, index) => this.smooth.add(step, this.loss.values[index]))
    this.changed()
  }

  clear() {
    for (const series of [this.loss, this.smooth, this.rate, this.norm, ...this.heldOut]) series.clear()
    this.previews.clear()
    this.said = {}
  }

  /** The curves of validations. */
  get heldOut() {
    return [this.validation, this.average, this.accuracy]
  }

  /** The run starts over or went back: forget the losses from this step on (and before the first). */
  forget(step) {
    const from = step > 1 ? step : 0
    for (const series of this.heldOut) {
      while (series.last.step >= from) series.drop()
    }
    this.said.validation = this.validation.last.value
    this.said.average = this.average.last.value
    this.said.accuracy = this.accuracy.last.value
    this.previews.forget(from)
  }

  /** The state was saved as asked. */
  saved({ step }) {
    this.asks.save.disabled = false
    this.said.saved = step
    this.changed()
  }

  preview({ step, pictures }) {
    this.asks.sample.disabled = false
    const stepped = pictures.map((picture) => ({ ...picture, step }))
    this.previews.add(stepped, setting('Graft.Training.Previews'))
    this.changed()
  }

  /** The node is done: remember what it trained, and draw all of it from the store. */
  finished(output) {
    const result = output?.graft_run?.[0]
    if (result && this.drawnKey === `${result.key} ${result.until}`) return // `graft.end` has said so
    this.said.state = 'done'
    this.catching = undefined
    if (result) {
      remember(this.node, PROPERTY, { run: result.run, key: result.key, until: result.until })
      this.restoreStored()
    }
    this.changed()
  }

  /** The step ended: an event, which pages get that have not queued the workflow. */
  end(data) {
    if (data.ended === 'done') this.finished({ graft_run: [{ ...data, key: data.result }] })
    else this.ended(data.ended)
  }

  /** An error or the editor's own Cancel ended the run: say what is kept of it. */
  async ended(how) {
    if (this.said.state === how) return
    this.said.state = how
    this.catching = undefined
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

  /** Draw the step that runs, or a stored run: after a reload of the page, or when a saved workflow is opened. */
  async restore() {
    let calls
    try {
      calls = await callsNow()
    } catch {
      calls = [] // the server is away; the page says so
    }
    const call = calls.find((one) => this.owns(one))
    if (call) await this.catchUp(call)
    else await this.restoreStored()
  }

  async restoreStored() {
    const { run, key, until } = this.node.properties?.[PROPERTY] ?? {}
    const shown = `${key} ${until}`
    if (!run || !key || shown === this.drawnKey) return
    const live = this.drawnKey === undefined // no other state of the store is drawn: the pictures came while it ran
    this.drawnKey = shown
    let stored
    try {
      stored = await asked(`/graft/runs/${encodeURIComponent(run)}/${encodeURIComponent(key)}?until=${until ?? 0}`)
    } catch (error) {
      this.drawnKey = undefined
      if (!this.loss.steps.length) this.sayGone(run, error)
      this.refit()
      return
    }
    if (this.drawnKey !== shown) return // the next run began meanwhile
    this.showStored(run, stored, live ? this.previews.all : [])
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
    const { loss: losses, rate, norm } = history
    losses.forEach((loss, index) => this.add({ step: index + 1, loss, rate: rate[index], norm: norm?.[index] }))
    for (const [at, loss] of history.validation) this.validation.add(at, loss) // ascending; 0 is before the first step
    for (const [at, loss] of history.average_validation ?? []) this.average.add(at, loss)
    for (const [at, share] of history.accuracy ?? []) this.accuracy.add(at, share)
    this.said = {
      run,
      step,
      until: step,
      loss: this.loss.last.value,
      rate: this.rate.last.value,
      validation: this.validation.last.value,
      average: this.average.last.value,
      accuracy: this.accuracy.last.value,
      state: 'done',
    }
    this.previews.add(previews?.length ? previews : pictures, setting('Graft.Training.Previews'))
    this.previews.recall()
    this.changed()
  }

  /** Save all that was measured, whichever curves are drawn. */
  saveTable() {
    const { loss, rate, norm, validation, average, accuracy } = this
    const table = curveTable({
      loss,
      learning_rate: rate,
      gradient_norm: norm,
      held_out_loss: validation,
      held_out_loss_of_average: average,
      implicit_accuracy: accuracy,
    })
    saveText(`${this.run}.csv`, table)
  }

  async askToStop() {
    this.stop.disabled = true
    this.stop.textContent = t('Stopping …')
    try {
      await posted(`/graft/stop?run=${encodeURIComponent(this.run)}`, {})
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
    const { step, until, loss, rate, validation, average, accuracy, state } = this.said
    if (step === undefined) return
    const running = state === 'running'
    const ending = this.ending()
    if (ending !== this.endingSaid) appMode.announce(this.node, 'ending', ending ? [ending] : [])
    this.endingSaid = ending
    const facts = [
      [t('step'), running ? t('{step} of {until}', { step, until }) : String(step)],
      [t('loss'), short(this.smooth.last.value ?? loss)],
      [t('held out'), Number.isFinite(validation) ? short(validation) : null],
      [t('average'), Number.isFinite(average) ? short(average) : null],
      [t('implicit accuracy'), Number.isFinite(accuracy) ? short(accuracy) : null],
      [t('rate'), short(rate)],
      ...(running ? this.pace() : []),
    ].filter(([, value]) => value !== null)
    this.status.replaceChildren(...facts.map(([name, value]) => el('span', {}, `${name} `, el('b', {}, value))))
    if (ending) this.status.append(el('span', { class: 'graft-ending' }, ending))
    this.offer(running)
    this.canvas.hidden = this.legend.hidden = !this.loss.steps.length
    this.switches.average.hidden = !this.average.steps.length
    this.switches.accuracy.hidden = !this.accuracy.steps.length
  }

  /** Show the buttons for what a running step can be asked for. */
  offer(running) {
    this.actions.hidden = !running
    for (const [what, button] of Object.entries(this.asks)) button.hidden = !this.said.can?.includes(what)
    if (!running) {
      for (const button of [this.stop, ...Object.values(this.asks)]) button.disabled = false
      this.stop.textContent = t('Stop and keep')
    }
  }

  /** How fast it runs, for how long still, and with how much memory. */
  pace() {
    const { speed, left, memory, saved, saving, settings } = this.said
    return [
      [t('memory ran out, now'), saving?.map((words) => t(SAVINGS[words] ?? words)).join(', ') ?? null],
      [t('saved at step'), saved ? String(saved) : null],
      [t('from the settings file'), settings || null],
      speed < 1 ? [t('s/it'), short(1 / speed)] : [t('it/s'), short(speed)],
      [t('left'), duration(left)],
      [t('memory'), Number.isFinite(memory) ? size(memory) : null],
    ]
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
    const rate = { series: this.rate, color: COLORS.rate, width: 1, format: twoDigits }
    const right = this.shown.has('rate') ? rate : null
    const options = { robust: !this.isFull, log: this.isLog, right }
    const curves = this.curves()
    const drawn = this.plot.draw(curves, twoDigits, options)
    this.full.hidden = !this.isFull && !drawn?.clipped
    if (this.said.state !== 'running') return
    appMode.showCurve((canvas, width, height) => draw(canvas, width, height, curves, twoDigits, options))
  }

  /** The curves over the axis on the left that are switched on. */
  curves() {
    return [
      { name: 'loss', series: this.loss, color: COLORS.loss, width: 1 },
      { name: 'smooth', series: this.smooth, color: COLORS.smooth, width: 2, within: this.loss },
      { name: 'validation', series: this.validation, color: COLORS.validation, width: 2, dots: true },
      { name: 'average', series: this.average, color: COLORS.average, width: 2, dots: true },
      { name: 'accuracy', series: this.accuracy, color: COLORS.accuracy, width: 2, dots: true },
    ].filter((curve) => this.shown.has(curve.name))
  }

  /** What is said of a step under the pointer: its own values, and the last held-out losses before it. */
  describe(step) {
    const lines = [[null, t('step {step}', { step })]]
    const series = { loss: this.loss, smooth: this.smooth, validation: this.validation, average: this.average }
    for (const [name, points] of Object.entries({ ...series, accuracy: this.accuracy, rate: this.rate })) {
      const at = points.until(step)
      if (!Number.isFinite(at.value)) continue
      const isHeldOut = this.heldOut.includes(points)
      const where = isHeldOut && at.step !== step ? ` (${t('step {step}', { step: at.step })})` : ''
      lines.push([COLORS[name], `${t(CURVES[name])} ${short(at.value)}${where}`])
    }
    return lines
  }

  refit() {
    requestAnimationFrame(() => {
      const height = roomOf(this.content, this.spare())
      if (this.isLarge || height === this.drawnHeight || !this.node.graph) return
      this.drawnHeight = height
      fitShown(this.node)
    })
  }

  /** It is shown at another node. */
  moved() {
    this.drawnHeight = undefined
    this.changed()
    this.refit()
  }
}
