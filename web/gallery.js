/**
 * Previews by step: a slider chooses the step, two steps can be compared side by side, and a click shows a picture over
 * the whole page. The newest step is shown until someone goes back. Of several prompts each has its rows, with its text
 * above them. Of two compared pictures a person says which is better.
 */
import { el } from './dom.js'
import { api } from './editor.js'
import { openOverlay } from './overlay.js'
import { Preferences } from './preferences.js'
import { t } from './texts.js'

const EMPTY = []

/** What two pictures of one prompt have in common: its number, and its text where that is known. */
const promptOf = ({ prompt, text }) => `${prompt ?? 0} ${text ?? ''}`

/** The element that plays a preview of video or sound; undefined for a picture. */
const playedAs = ({ filename }) => ({ mp4: 'video', wav: 'audio' })[filename.slice(-3)]

/** What tells the pictures of a step apart, and is the same at every step: prompt, weights or average, and place. */
const slotOf = (picture) => `${promptOf(picture)}/${picture.label}/${picture.place}`

/** Pictures {filename, subfolder, type, label, prompt, text, step} of a run, for any number of galleries. */
export class Previews {
  constructor() {
    this.galleries = new Set()
    this.preferences = new Preferences()
    this.clear()
  }

  clear() {
    this.all = []
    this.changed()
  }

  /** Add pictures, keeping the newest `most` of all. */
  add(pictures, most) {
    for (const picture of pictures) {
      const isBeside = (one) => one.label === picture.label && promptOf(one) === promptOf(picture)
      const before = this.at(picture.step).filter(isBeside)
      this.all.push({ ...picture, place: before.length })
    }
    this.all.splice(0, Math.max(0, this.all.length - most))
    this.changed()
  }

  /** Forget the pictures from a step on. */
  forget(step) {
    this.all = this.all.filter((picture) => picture.step < step)
    this.preferences.clear() // their files are written anew
    this.changed()
  }

  get steps() {
    return [...new Set(this.all.map((picture) => picture.step))].sort((one, other) => one - other)
  }

  at(step) {
    return this.all.filter((picture) => picture.step === step)
  }

  /** Mark again what was marked before the page was loaded. */
  async recall() {
    if (!this.all.length) return
    await this.preferences.recall(this.all[0])
    this.changed()
  }

  async prefer(better, worse) {
    await this.preferences.mark(better, worse)
    this.changed()
  }

  changed() {
    for (const gallery of this.galleries) gallery.show()
  }
}

/** A gallery of previews; with `only`, of one picture of each step. `sized()` is called when its height may change. */
export class Gallery {
  constructor(previews, sized, only = null) {
    Object.assign(this, { previews, sized, only, chosen: null, other: null })
    this.sliders = [this.slider('chosen', t('Step of the previews')), this.slider('other', t('Step to compare with'))]
    this.box = el('input', { type: 'checkbox' })
    this.box.addEventListener('change', () => {
      this.other = this.box.checked ? previews.steps[0] : null
      this.show()
    })
    this.compare = el('label', {}, this.box, el('span', {}, t('Compare')))
    const [chosen, other] = this.sliders.map((slider) => slider.element)
    this.head = el('div', { class: 'graft-gallery-head' }, other, chosen, this.compare) // as the pictures lie
    this.strip = el('div', { class: 'graft-pictures' })
    this.strip.addEventListener('wheel', (event) => this.scrolls() && event.stopPropagation())
    this.words = el('div', { class: 'graft-prompt' }) // of the one picture that is shown with `only`
    this.kept = el('div', { role: 'status' })
    this.element = el('div', { class: 'graft-gallery' }, this.head, this.kept, this.words, this.strip)
    previews.galleries.add(this)
    this.show()
  }

  slider(name, label) {
    const input = el('input', { type: 'range', min: 0, step: 1, 'aria-label': label })
    const said = el('output', {})
    input.addEventListener('input', () => {
      const { steps } = this.previews
      const isNewest = name === 'chosen' && Number(input.value) === steps.length - 1 // and so follow the run
      this[name] = isNewest ? null : steps[Number(input.value)]
      this.show()
    })
    return { element: el('span', { class: 'graft-step-slider' }, input, said), input, said }
  }

  show() {
    const { steps } = this.previews
    if (!steps.includes(this.chosen)) this.chosen = null
    if (this.other !== null && !steps.includes(this.other)) this.other = steps[0] ?? null
    const newest = steps[steps.length - 1]
    const [step, other] = [this.chosen ?? newest, this.other]
    this.element.hidden = !steps.length
    this.head.hidden = steps.length < 2
    this.sliders[1].element.hidden = other === null
    for (const [slider, at] of [
      [this.sliders[0], step],
      [this.sliders[1], other ?? step],
    ]) {
      slider.input.max = String(Math.max(0, steps.length - 1))
      slider.input.value = String(steps.indexOf(at))
      slider.said.textContent = t('step {step}', { step: at })
      slider.input.setAttribute('aria-valuetext', slider.said.textContent)
    }
    this.strip.classList.toggle('graft-compared', other !== null)
    this.strip.classList.toggle('graft-by-prompt', !this.only && this.of(step).some((one) => one.prompt))
    this.fill(this.rows(step, other))
    this.words.textContent = (this.only && this.of(step)[0]?.text) || ''
    this.words.hidden = !this.words.textContent
    this.tell(this.previews.preferences)
    this.sized()
  }

  /** Say what became of the last mark. */
  tell({ said, isProblem }) {
    this.kept.textContent = said
    this.kept.className = isProblem ? 'graft-problem' : 'graft-dim'
    this.kept.hidden = !said
  }

  /** Put new pictures in place of those of before; the button at the same place has the focus again. */
  fill(figures) {
    const buttons = () => [...this.strip.querySelectorAll('button')]
    const focused = buttons().indexOf(document.activeElement)
    this.strip.replaceChildren(...figures)
    buttons()[focused]?.focus({ preventScroll: true })
  }

  scrolls() {
    return this.strip.scrollHeight > this.strip.clientHeight
  }

  /** Figures, with more prompts those of each below its text. */
  rows(step, other) {
    const pictures = this.of(step)
    const figures = (some) => (other === null ? some.map((one) => this.figure(one)) : this.pairs(some, other))
    if (!this.strip.classList.contains('graft-by-prompt')) return figures(pictures)
    return [...new Set(pictures.map(promptOf))].flatMap((prompt) => {
      const own = pictures.filter((one) => promptOf(one) === prompt)
      return [this.heading(own[0]), ...figures(own)]
    })
  }

  heading({ prompt, text }) {
    const name = prompt ? t('prompt {number}', { number: prompt }) : t('positive prompt')
    return el('div', { class: 'graft-prompt', title: text ?? '' }, el('b', {}, name), text ? ` ${text}` : null)
  }

  of(step) {
    const pictures = step === undefined ? EMPTY : this.previews.at(step)
    return this.only ? pictures.filter((picture) => slotOf(picture) === this.only) : pictures
  }

  /**
   * Figures of two steps, those of the same prompt beside each other: the step to compare with on the left. Below them a
   * person says which is better.
   */
  pairs(pictures, other) {
    const before = new Map(this.of(other).map((picture) => [slotOf(picture), picture]))
    return pictures.flatMap((picture) => {
      const left = before.get(slotOf(picture))
      const figures = [left ? this.figure(left) : el('span', {}), this.figure(picture)]
      if (!left || left.step === picture.step || playedAs(picture)) return figures
      return [...figures, this.verdict(left, picture), this.verdict(picture, left)]
    })
  }

  /** The button below a picture that says that it is better than another. */
  verdict(picture, other) {
    const isBetter = this.previews.preferences.prefers(picture, other)
    return el(
      'button',
      {
        class: 'graft-button graft-verdict',
        type: 'button',
        title: t('Keep both as a preference pair for training with the loss dpo'),
        'aria-pressed': String(isBetter),
        onclick: () => this.previews.prefer(picture, other),
      },
      isBetter ? t('✓ This one is better') : t('This one is better'),
    )
  }

  figure(picture) {
    const query = new URLSearchParams({
      filename: picture.filename,
      subfolder: picture.subfolder ?? '',
      type: picture.type,
    })
    const label = [
      t('step {step}', { step: picture.step }),
      picture.prompt ? t('prompt {number}', { number: picture.prompt }) : '',
      picture.label ? t(picture.label) : '',
    ]
      .filter(Boolean)
      .join(', ')
    const src = api.apiURL(`/view?${query}`)
    const played = playedAs(picture)
    if (played) {
      const player = el(played, { src, controls: true, loop: played === 'video', preload: 'metadata' })
      player.setAttribute('aria-label', t('Preview, {label}', { label }))
      player.addEventListener('loadedmetadata', () => this.sized())
      return el('figure', {}, player, el('figcaption', {}, label))
    }
    const image = el('img', {
      src,
      alt: t('Preview, {label}', { label }),
      ...this.pixels, // room for it before it has come: rows that are looked at stay where they are
      onload: () => {
        this.pixels = { width: image.naturalWidth, height: image.naturalHeight }
        this.sized()
      },
    })
    if (this.only) return el('figure', {}, image, el('figcaption', {}, label))
    const open = el('button', { class: 'graft-enlarge', type: 'button', title: t('Enlarge') }, image)
    open.addEventListener('click', () => this.enlarge(picture))
    return el('figure', {}, open, el('figcaption', {}, label))
  }

  /** Show a picture over the whole page, with a slider and a comparison of its own. */
  enlarge(picture) {
    const large = new Gallery(this.previews, () => {}, slotOf(picture))
    large.chosen = this.other === null ? picture.step : this.chosen
    large.other = this.other
    large.box.checked = this.other !== null
    large.show()
    openOverlay(t('Previews'), large.element, () => this.previews.galleries.delete(large))
    large.sliders[0].input.focus()
  }
}
