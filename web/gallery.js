/**
 * Previews by step: a slider chooses the step, two steps can be compared side by side, and a click shows a picture over
 * the whole page. The newest step is shown until someone goes back.
 */
import { el } from './dom.js'
import { api } from './editor.js'
import { openOverlay } from './overlay.js'
import { t } from './texts.js'

const EMPTY = []

/** What tells the pictures of a step apart, and is the same at every step: prompt, weights or average, and place. */
const slotOf = ({ prompt, label, place }) => `${prompt ?? 0}/${label}/${place}`

/** Pictures {filename, subfolder, type, label, prompt, step} of a run, for any number of galleries. */
export class Previews {
  constructor() {
    this.galleries = new Set()
    this.clear()
  }

  clear() {
    this.all = []
    this.changed()
  }

  /** Add pictures, keeping the newest `most` of all. */
  add(pictures, most) {
    for (const picture of pictures) {
      const before = this.at(picture.step).filter((one) => one.label === picture.label && one.prompt === picture.prompt)
      this.all.push({ ...picture, place: before.length })
    }
    this.all.splice(0, Math.max(0, this.all.length - most))
    this.changed()
  }

  /** Forget the pictures from a step on. */
  forget(step) {
    this.all = this.all.filter((picture) => picture.step < step)
    this.changed()
  }

  get steps() {
    return [...new Set(this.all.map((picture) => picture.step))].sort((one, other) => one - other)
  }

  at(step) {
    return this.all.filter((picture) => picture.step === step)
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
    this.element = el('div', { class: 'graft-gallery' }, this.head, this.strip)
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
    return { element: el('span', { class: 'graft-slider' }, input, said), input, said }
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
    const figures = other === null ? this.of(step).map((one) => this.figure(one)) : this.pairs(step, other)
    this.strip.classList.toggle('graft-compared', other !== null)
    this.strip.replaceChildren(...figures)
    this.sized()
  }

  of(step) {
    const pictures = step === undefined ? EMPTY : this.previews.at(step)
    return this.only ? pictures.filter((picture) => slotOf(picture) === this.only) : pictures
  }

  /** Figures of two steps, those of the same prompt beside each other: the step to compare with on the left. */
  pairs(step, other) {
    const before = new Map(this.of(other).map((picture) => [slotOf(picture), picture]))
    return this.of(step).flatMap((picture) => {
      const left = before.get(slotOf(picture))
      return [left ? this.figure(left) : el('span', {}), this.figure(picture)]
    })
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
    const image = el('img', {
      src: api.apiURL(`/view?${query}`),
      alt: t('Preview, {label}', { label }),
      onload: () => this.sized(),
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
