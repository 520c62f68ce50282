/**
 * The panel of GraftDataset: thumbnails with captions, buckets and problems. As soon as a folder is chosen it shows what
 * the headers of its pictures say; after a run, what was read (the node's `graft_dataset` output,
 * training/data/folder_report.py makes both). Captions are edited in place; dropped files are uploaded.
 */
import { announce } from './app_mode.js'
import { editCaption, forgetHistory, historyAt } from './caption_editor.js'
import { askAndUpload, entriesOf, plan } from './dataset_upload.js'
import { el, hasFiles } from './dom.js'
import {
  addPanel,
  api,
  app,
  chain,
  changing,
  everyNode,
  isRestoring,
  placeOf,
  posted,
  trackerOf,
  widen,
  wordsOf,
} from './editor.js'
import { chooserOf, refreshOutside } from './folder_chooser.js'
import { linkOf, valueOf, widgetOf } from './latent_size.js'
import { inOrder, leaveOut, lossLines, lossesOf, orderChoice } from './picture_losses.js'
import { boxOf } from './problem_box.js'
import { say } from './problems.js'
import { fitShown, offer } from './subgraph_panels.js'
import { t } from './texts.js'

const AT_ONCE = 24
const HEIGHT = 270 // as graft.css has it
const PATIENCE = 400 // milliseconds without a further change before the folder is looked at
const CAPTIONS = 'graft captions' // the last change of a caption
const PROPERTY = 'graft folder' // that was read last, where a link gives its name
const UNUSED = ['regularization_share', 'caption_dropout', 'clip_skip', 'weighted_captions', 'dataset']
const panels = new WeakMap()

/** Give a GraftDataset node its panel. */
export function addDatasetPanel(node) {
  panels.set(node, new Panel(node))
}

/** Follow the graph: the folder's name may come from another node. Once. */
export function listen() {
  api.addEventListener('graphChanged', () => everyNode((node) => panels.get(node)?.follow()))
  api.addEventListener('graft.picture_losses', () => everyNode((node) => panels.get(node)?.readLosses()))
}

/** Look at the folders again, as files have come or changed. */
export function refresh() {
  everyNode((node) => panels.get(node)?.follow(true))
}

class Panel {
  constructor(node) {
    this.node = node
    this.question = null // what the panel shows the answer to
    this.tab = 'Images'
    this.losses = new Map() // that Picture Losses has measured, by name
    this.order = 'by name'
    this.editing = false
    this.status = el('div', { class: 'graft-status', role: 'status' })
    this.problem = el('div', { class: 'graft-problem', role: 'alert', hidden: true })
    this.undoer = el(
      'button',
      { class: 'graft-button', type: 'button', hidden: true, onclick: () => this.undo() },
      t('Undo caption'),
    )
    this.tabs = el('div', { class: 'graft-tabs', role: 'tablist' })
    this.body = el('div', { class: 'graft-scroll', role: 'tabpanel', tabIndex: 0 })
    this.content = el(
      'div',
      { class: 'graft-content graft-looked' },
      el('div', { class: 'graft-tabs' }, this.tabs, this.undoer),
      this.status,
      this.problem,
      this.body,
    )
    addPanel(node, 'dataset', this.content)
    offer(node, this.content, {
      spare: () => Math.max(0, this.content.offsetHeight - HEIGHT),
      moved: () => this.refit(),
      drop: (event) => this.drop(event),
    })
    widen(node, 340)
    this.body.addEventListener('wheel', (event) => this.scrolls() && event.stopPropagation())
    this.empty()
    this.connect()
  }

  connect() {
    const { node, content } = this
    const chooser = chooserOf(node)
    if (chooser) {
      chooser.onRead = () => this.follow()
      chooser.onProblem = (line) => this.say([line])
    }
    chain(node, 'onAdded', () => isRestoring() || queueMicrotask(() => this.begin()))
    chain(node, 'onConfigure', () => {
      if (isRestoring()) this.followUndo()
      this.follow()
      requestAnimationFrame(() => this.follow()) // now its links are there
    })
    chain(node, 'onConnectionsChange', () => requestAnimationFrame(() => this.follow()))
    chain(node, 'onExecuted', (output) => output?.graft_dataset?.[0] && this.ran(output.graft_dataset[0]))
    for (const widget of node.widgets ?? []) chain(widget, 'callback', () => this.follow())
    node.onDragOver = hasFiles
    node.onDragDrop = (event) => this.drop(event)
    content.addEventListener('dragover', (event) => {
      if (!hasFiles(event)) return
      event.preventDefault()
      event.stopPropagation()
    })
    content.addEventListener('drop', (event) => {
      if (!hasFiles(event)) return
      event.preventDefault()
      event.stopPropagation()
      this.drop(event)
    })
  }

  /** The node's inputs as they are now, without those that change nothing here. */
  inputs() {
    const names = (this.node.widgets ?? []).filter((widget) => !UNUSED.includes(widget.name)).map(({ name }) => name)
    const known = names.map((name) => [name, valueOf(this.node, name)]).filter(([, value]) => value !== undefined)
    return { folder: this.node.properties?.[PROPERTY], ...Object.fromEntries(known) }
  }

  /** Look at the folder when an input has changed, or anyway. */
  follow(anyway = false) {
    const inputs = this.inputs()
    const question = JSON.stringify(inputs)
    if (question !== this.question) this.known = {}
    this.tellChooser({})
    if (question === this.question && !anyway) return
    this.question = question
    this.asking = null
    clearTimeout(this.timer)
    if (inputs.folder) this.timer = setTimeout(() => this.look(inputs), PATIENCE)
    else this.empty()
  }

  /** Look at the folder at once. */
  lookNow() {
    clearTimeout(this.timer)
    const inputs = this.inputs()
    this.question = JSON.stringify(inputs)
    return this.look(inputs)
  }

  tellChooser(said) {
    const chooser = chooserOf(this.node)
    const isLinked = linkOf(this.node, 'folder') !== undefined
    // front end 1.27 draws the chooser itself on the subgraph's own node
    const isShared = chooser && widgetOf(this.node, 'folder')?.element === chooser.element
    const linked = isLinked && !isShared ? (this.inputs().folder ?? t('from the link')) : undefined
    this.known = { ...this.known, ...said }
    chooser?.tell({ ...this.known, linked })
  }

  async look(inputs) {
    const mine = (this.asking = {}) // a change, or a run that ends, makes this answer too old to show
    this.status.replaceChildren(el('span', { class: 'graft-dim' }, t('Looking at the folder …')))
    try {
      const found = await posted('/graft/dataset/glance', inputs)
      if (mine !== this.asking) return
      if (found.folders) this.showConfig(found)
      else this.show(found)
    } catch (error) {
      if (mine === this.asking) this.refuse(wordsOf(error))
    }
  }

  ran(found) {
    this.asking = null
    clearTimeout(this.timer)
    const inputs = this.inputs()
    const folder = String(found.folder || inputs.folder)
    if (valueOf(this.node, 'folder') === undefined) this.node.properties[PROPERTY] = folder
    this.question = JSON.stringify(this.inputs())
    this.show({ ...found, folder, isRead: true })
    const placed = found.placed ?? [] // the demo's folders; a cached node says again what it has said
    if (String(placed) !== String(this.placed ?? [])) announce(this.node, 'placed', placed)
    this.placed = placed
  }

  say(lines) {
    this.problem.replaceChildren(...lines.map((line) => el('div', {}, line)))
    this.problem.hidden = !lines.length
    this.refit()
  }

  /** While a person edits or answers, what would be drawn comes afterwards. */
  waits(act) {
    if (this.editing) this.late = act
    return this.editing
  }

  empty() {
    if (this.waits(() => this.empty())) return
    this.found = null
    this.tellChooser({ count: undefined, wrong: false })
    this.tabs.replaceChildren()
    this.status.replaceChildren()
    this.body.replaceChildren(hint())
    this.say([])
    this.warn('')
  }

  refuse(message) {
    if (this.waits(() => this.refuse(message))) return
    this.empty()
    this.tellChooser({ wrong: true })
    this.warn(message)
  }

  /** Say above the panel what a run would refuse, where a refused run says it too; "" takes it back. */
  warn(message) {
    if (message) say(this.node, [message])
    else if (boxOf(this.node)?.textContent === this.warning) say(this.node, [])
    this.warning = message
  }

  show(found) {
    if (this.waits(() => this.show(found))) return
    const isOther = this.found?.folder !== found.folder
    this.found = found
    this.say([])
    this.warn(found.refusal ?? '')
    this.tellChooser({ count: found.found ?? found.count, wrong: Boolean(found.refusal) })
    this.status.replaceChildren(...summary(found).map((fact) => el('span', {}, fact)))
    const counts = { Images: found.count, Buckets: found.buckets.length, Problems: found.problems.length }
    this.tabs.replaceChildren(...Object.entries(counts).map(([name, count]) => this.tabOf(name, count)))
    if (isOther) this.tab = counts.Problems ? 'Problems' : 'Images'
    if (isOther) this.losses = new Map()
    this.turn(this.tab)
    this.readLosses()
  }

  /** Find what has been measured of the pictures that are shown; several folders at once have no losses here. */
  async readLosses() {
    const { found } = this
    if (!found?.pictures || found.folder === '.') return
    let losses
    try {
      losses = await lossesOf(found.folder, found.pictures)
    } catch (error) {
      if (this.found === found) this.say([wordsOf(error)])
      return
    }
    if (this.found !== found || (!losses.size && !this.losses.size)) return
    this.losses = losses
    if (this.tab === 'Images' && !this.waits(() => this.readLosses())) this.turn(this.tab)
  }

  /** Leave a picture out of the training: its name goes into filters. */
  leaveOut(name) {
    const widget = widgetOf(this.node, 'filters')
    const filters = widget ? leaveOut(String(widget.value ?? ''), name) : null
    if (filters === null) {
      this.say([t('Add it to filters (YAML) yourself: leave_out: [{name}]', { name: JSON.stringify(name) })])
      return
    }
    changing(() => setTo(widget, filters))
  }

  /** kohya's dataset_config.toml: which folders it names. */
  showConfig(found) {
    if (this.waits(() => this.showConfig(found))) return
    this.empty()
    const { folders, notes } = found
    const count = t('{count} folders, read when you run', { count: folders.length })
    this.status.replaceChildren(el('span', {}, count))
    this.body.replaceChildren(...[...folders, ...notes].map((line) => el('div', {}, line)))
    this.refit()
  }

  tabOf(name, count) {
    const act = () => this.turn(name)
    const tab = el(
      'button',
      { class: 'graft-button', type: 'button', role: 'tab', onclick: act },
      `${t(name)} (${count})`,
    )
    tab.dataset.name = name
    return tab
  }

  turn(name) {
    if (this.editing) return
    this.tab = name
    const { found } = this
    const made = {
      Images: () => this.pictures(),
      Buckets: () => bucketTable(found),
      Problems: () => problemList(found),
    }
    this.body.replaceChildren(made[name]())
    for (const tab of this.tabs.children) tab.setAttribute('aria-selected', String(tab.dataset.name === name))
    this.refit()
  }

  refit() {
    requestAnimationFrame(() => fitShown(this.node))
  }

  scrolls() {
    return this.body.scrollHeight > this.body.clientHeight
  }

  pictures() {
    const { losses } = this
    const rows = inOrder(this.found.pictures, losses.size ? this.order : 'by name', losses)
    const strip = el('div', { class: 'graft-pictures' })
    const more = el('button', { class: 'graft-button', type: 'button', onclick: () => add() }, t('More'))
    const add = () => {
      const from = strip.childElementCount
      strip.append(...rows.slice(from, from + AT_ONCE).map((row) => this.figure(row)))
      more.hidden = strip.childElementCount >= rows.length
    }
    add()
    const left = this.found.count - rows.length
    const rest = left > 0 ? el('div', { class: 'graft-dim' }, t('{count} more are not shown', { count: left })) : null
    const choose = (order) => {
      this.order = order
      this.turn('Images')
    }
    return el('div', {}, losses.size ? orderChoice(this.order, choose) : null, strip, more, rest)
  }

  figure(row) {
    const { folder } = this.found
    const facts = [
      `${row.width}×${row.height} → ${row.bucket.join('×')}`,
      row.frames ? t('{parts} parts of {frames} frames', { parts: row.parts, frames: row.frames.join(', ') }) : null,
      row.held_out ? t('held out') : null,
      row.mask ? t('mask') : null,
      row.captioned ? null : t('no caption'),
    ]
    const caption = `${row.caption}${row.varies ? t(' (varies)') : ''}`
    const query = new URLSearchParams({ folder, name: row.name })
    const edit = el(
      'button',
      {
        class: 'graft-caption',
        type: 'button',
        title: t('Edit the caption'),
        'aria-label': t('Edit the caption of {name}', { name: row.name }),
        onclick: () => this.edit(row, figure),
      },
      caption || t('no caption'),
    )
    const figure = el(
      'figure',
      { title: `${row.name}\n${facts.filter(Boolean).join(', ')}\n${caption}` },
      el('img', { src: api.apiURL(`/graft/dataset/thumbnail?${query}`), alt: row.name, loading: 'lazy' }),
      row.frames ? el('span', { class: 'graft-frames', 'aria-hidden': 'true' }, `▶ ${row.frames.join(', ')}`) : null,
      el('figcaption', {}, el('b', {}, row.name), edit, ...this.lossOf(row)),
    )
    return figure
  }

  /** What Picture Losses has measured of a picture, and the button that leaves it out. */
  lossOf({ name }) {
    const loss = this.losses.get(name)
    if (!loss) return []
    const act = () => this.leaveOut(name)
    const label = t('Leave out {name}', { name })
    const button = { class: 'graft-button', type: 'button', 'aria-label': label, title: label, onclick: act }
    return [...lossLines(loss), el('button', button, t('Leave out'))]
  }

  get history() {
    return historyAt(trackerOf() ?? app, placeOf(this.node))
  }

  /** Leave the captions alone that an earlier node with this id has changed; a loaded node may have changed them itself. */
  begin() {
    if (!(CAPTIONS in (this.node.properties ?? {}))) forgetHistory(trackerOf() ?? app, placeOf(this.node))
  }

  /** Note in the workflow which change of a caption was the last: one step of undo. */
  noteCaption() {
    changing(() => (this.node.properties[CAPTIONS] = this.history.mark))
  }

  /** Bring the captions to where an undo or a redo has brought the workflow. */
  async followUndo() {
    const problems = []
    try {
      const isWritten = await this.history.moveTo(this.node.properties?.[CAPTIONS] ?? '')
      if (!isWritten) return this.tellUndo()
    } catch (error) {
      problems.push(t('Not undone: {error}', { error: wordsOf(error) }))
    }
    this.tellUndo()
    await this.lookNow()
    if (problems.length) this.say(problems)
  }

  async edit(row, figure) {
    if (this.editing) return
    this.editing = true
    this.say([])
    const captions = String(valueOf(this.node, 'captions') ?? 'auto')
    const { folder, encoding = 'utf-8' } = this.found
    figure.classList.add('graft-wide')
    const done = (saved) => {
      this.editing = false
      figure.classList.remove('graft-wide')
      figure.querySelector('.graft-caption').focus()
      if (saved) {
        this.noteCaption()
        this.renew(row, figure)
      }
      this.late?.()
      this.late = null
    }
    try {
      await editCaption({ folder, name: row.name, captions, encoding }, figure, this.history, done)
    } catch (error) {
      done(false)
      this.say([wordsOf(error)])
    }
  }

  async undo() {
    this.undoer.disabled = true
    try {
      const { folder, name } = await this.history.undo()
      this.noteCaption()
      this.say([])
      const rows = this.found?.folder === folder ? this.found.pictures : []
      const row = rows.find((one) => one.name === name)
      if (row) await this.renew(row)
    } catch (error) {
      this.say([t('Not undone: {error}', { error: wordsOf(error) })])
    }
    this.tellUndo()
  }

  tellUndo() {
    const { last } = this.history
    this.undoer.disabled = false
    this.undoer.hidden = !last
    this.undoer.title = last ? t('Put back the caption that {name} had before', { name: last.place.name }) : ''
  }

  /** Read a picture's row again, whose caption has changed. */
  async renew(row, figure = null) {
    this.tellUndo()
    const inputs = { ...this.inputs(), folder: this.found.folder, only: row.name }
    try {
      const { pictures, problems } = await posted('/graft/dataset/glance', inputs)
      const now = pictures.find((one) => one.name === row.name)
      if (now) Object.assign(row, { caption: now.caption, varies: now.varies, captioned: now.captioned })
      else this.say(problems.map(lineOf))
    } catch (error) {
      this.say([wordsOf(error)])
      return
    }
    const shown =
      figure ?? [...this.body.querySelectorAll('figure')].find((one) => one.title.startsWith(`${row.name}\n`))
    shown?.replaceWith(this.figure(row))
  }

  /** Take files that were dropped; true, as they are taken. */
  drop(event) {
    const entries = entriesOf(event)
    if (!entries.length) return false
    this.upload(entries)
    return true
  }

  async upload(entries) {
    if (this.editing) {
      this.say([t('Save or cancel the caption first, then drop the files again.')])
      return
    }
    this.editing = true // what is shown stays until it is answered
    this.problem.hidden = true // it was about what was dropped before
    const chosen = String(valueOf(this.node, 'folder') ?? '')
    const done = (folder, problems) => {
      this.editing = false
      const { late } = this
      this.late = null
      if (folder !== null) this.take(folder, problems)
      else if (late) late()
      else this.restore()
      if (folder === null) this.say(problems)
    }
    try {
      askAndUpload(this.body, await plan(entries, chosen), done)
    } catch (error) {
      done(null, [wordsOf(error)])
    }
  }

  /** Show again what was shown before files were dropped. */
  restore() {
    if (this.found) this.turn(this.tab)
    else this.body.replaceChildren(hint())
  }

  problemCount() {
    return this.found?.problems.length ?? 0
  }

  /** Choose the folder that was uploaded to, and look at it. */
  async take(folder, problems) {
    const widget = widgetOf(this.node, 'folder') // where the folder is linked: that of the subgraph's own node
    const chooser = chooserOf(this.node)
    refreshOutside()
    if (widget && widget === chooser?.widget) {
      if (chooser.value !== folder) chooser.take(folder)
    } else if (widget) changing(() => setTo(widget, folder))
    else problems = [...problems, t('Uploaded to {folder}. Now choose it where the link comes from.', { folder })]
    const before = this.problemCount()
    await this.lookNow()
    if (this.problemCount() > before) this.turn('Problems')
    if (problems.length) this.say(problems)
  }
}

function setTo(widget, value) {
  widget.value = value
  widget.callback?.(value)
}

const hint = () =>
  el('div', { class: 'graft-dim graft-drop' }, t('Choose a folder above, or drop a folder or pictures here.'))

/** What is said above the tabs' contents. */
function summary(found) {
  const lines = []
  if (found.seen < found.found) lines.push(t('first {seen} of {found} looked at', found))
  if (found.train !== undefined) lines.push(t('{train} to train on, {held_out} held out', found))
  if (found.a_round > found.count) lines.push(t('{count} per epoch with repeats', { count: found.a_round }))
  return [...lines, ...(found.placed ?? [])]
}

const sizeOf = ({ width, height, frames, batch_id }) =>
  [[width, height, frames].filter(Boolean).join(' × '), batch_id].filter(Boolean).join(' ')

function bucketTable(found) {
  const heads = found.isRead ? [t('size'), t('trained'), t('held out')] : [t('size'), t('pictures')]
  const cells = (bucket) => (found.isRead ? [bucket.train, bucket.held_out] : [bucket.train])
  const body = found.buckets.map((bucket) =>
    el('tr', {}, el('td', {}, sizeOf(bucket)), ...cells(bucket).map((count) => el('td', {}, String(count)))),
  )
  return el(
    'table',
    { class: 'graft-table', 'aria-label': t('Buckets') },
    el('thead', {}, el('tr', {}, ...heads.map((head) => el('th', { scope: 'col' }, head)))),
    el('tbody', {}, ...body),
  )
}

const lineOf = ({ name, message }) => (message ? `${name}: ${message}` : name)

function problemList(found) {
  const lines = found.problems.map((one) => el('li', { class: 'graft-problem' }, lineOf(one)))
  const notes = (found.notes ?? []).map((note) => el('li', {}, note))
  if (!lines.length && !notes.length) return el('div', {}, t('None.'))
  return el('ul', { class: 'graft-list' }, ...lines, ...notes)
}
