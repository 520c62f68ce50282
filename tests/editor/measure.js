/**
 * What a page looks like, measured: every visible text of Graft's panels and dialogs against what is behind it, the lines
 * and marks of charts, and what is cut, lies over something else, or needs scrolling sideways. Returns {contrasts:
 * [[ratio, least, what]], mislaid: [what], texts}. `watch` comes first: it notes what is drawn into charts.
 */
/** Note what is drawn into charts from now on, once a page. */
export function watch() {
  const pen = CanvasRenderingContext2D.prototype
  if (window.graftDrawn) return
  window.graftDrawn = new WeakMap() // canvas -> [[kind, style]]
  const noted = { fillText: ['text', 'fillStyle'], stroke: ['line', 'strokeStyle'] }
  Object.assign(noted, { fill: ['mark', 'fillStyle'], fillRect: ['mark', 'fillStyle'] })
  for (const [name, [kind, style]] of Object.entries(noted)) {
    const before = pen[name]
    pen[name] = function (...given) {
      if (this.canvas.classList?.contains('graft-chart')) window.graftDrawn.get(this.canvas)?.push([kind, this[style]])
      return before.apply(this, given)
    }
  }
  const { clearRect } = pen
  pen.clearRect = function (...given) {
    if (this.canvas.classList?.contains('graft-chart')) window.graftDrawn.set(this.canvas, [])
    return clearRect.apply(this, given)
  }
}

/** Measure what is on the page. */
export function measure() {
  const [TEXT, MARK] = [4.5, 3]
  const CONTROLS = 'button, input, select, textarea, img, canvas'
  const swatch = Object.assign(document.createElement('canvas'), { width: 1, height: 1 })
  const pen = swatch.getContext('2d', { willReadFrequently: true })
  const known = new Map()
  const parse = (css) => {
    if (!known.has(css)) {
      pen.clearRect(0, 0, 1, 1)
      pen.fillStyle = css
      pen.fillRect(0, 0, 1, 1)
      const [red, green, blue, alpha] = pen.getImageData(0, 0, 1, 1).data
      known.set(css, [red, green, blue, alpha / 255])
    }
    return known.get(css)
  }
  const faded = (css, opacity) => {
    const [red, green, blue, alpha] = parse(css)
    return `rgb(${red} ${green} ${blue} / ${alpha * Number(opacity)})`
  }
  const mixed = (under, over, share) => [0, 1, 2].map((at) => under[at] * (1 - share) + over[at] * share)
  const over = (color, under) => mixed(under, color, color[3])
  const channel = (value) => {
    const part = value / 255
    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4
  }
  const light = ([red, green, blue]) => 0.2126 * channel(red) + 0.7152 * channel(green) + 0.0722 * channel(blue)
  const ratio = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((first, second) => first - second)
    return (high + 0.05) / (low + 0.05)
  }

  /** What the classic canvas has drawn where an element lies: the node. Nothing where that is outside the window. */
  const drawnBelow = (element) => {
    const { canvas } = window.app.canvas
    const [box, place] = [element.getBoundingClientRect(), canvas.getBoundingClientRect()]
    const part = within(within(box, place), { left: 0, top: 0, right: innerWidth, bottom: innerHeight })
    if (isGone(part)) return null
    const sharp = canvas.width / place.width
    const at = [(part.left + part.right) / 2 - place.left, part.top + 1 - place.top].map((side) =>
      Math.round(side * sharp),
    )
    return [...canvas.getContext('2d').getImageData(...at, 1, 1).data].slice(0, 3)
  }
  const ancestors = (element) => {
    const all = []
    for (let at = element; at; at = at.parentElement) all.unshift(at)
    return all
  }
  /** [the background, the color on it] as they are seen at an element: alpha and opacity of all around it. */
  const seen = (element, color) => {
    const around = ancestors(element)
    const widget = element.closest('.dom-widget')
    const from = widget ? around.indexOf(widget) : 0
    const paint = (index, under) => {
      const style = getComputedStyle(around[index])
      const back = over(parse(style.backgroundColor), under)
      const inner = index + 1 < around.length ? paint(index + 1, back) : [back, over(color, back)]
      return inner.map((one) => mixed(under, one, Number(style.opacity)))
    }
    const drawn = widget ? drawnBelow(widget) : [255, 255, 255]
    return drawn && paint(from, drawn)
  }

  const shown = (element) => element.checkVisibility({ visibilityProperty: true, opacityProperty: true })
  const named = (element, text) => `${element.tagName.toLowerCase()}.${element.className} “${text.trim().slice(0, 40)}”`
  const inner = (element) => {
    const [box, style] = [element.getBoundingClientRect(), getComputedStyle(element)]
    return {
      left: box.left + parseFloat(style.borderLeftWidth),
      right: box.right - parseFloat(style.borderRightWidth),
      top: box.top + parseFloat(style.borderTopWidth),
      bottom: box.bottom - parseFloat(style.borderBottomWidth),
    }
  }
  const within = (box, edge) => ({
    left: Math.max(box.left, edge.left),
    right: Math.min(box.right, edge.right),
    top: Math.max(box.top, edge.top),
    bottom: Math.min(box.bottom, edge.bottom),
  })
  const isGone = (box) => box.right - box.left < 1 || box.bottom - box.top < 1
  const isTitled = (element) => Boolean(element.closest('[title]')?.title)
  const scrolls = (overflow) => ['auto', 'scroll'].includes(overflow)
  const hides = (overflow) => ['hidden', 'clip'].includes(overflow)

  const contrasts = []
  const mislaid = []
  const contrast = (element, css, least, what) => {
    const found = seen(element, parse(css))
    if (found) contrasts.push([ratio(...found), least, what])
  }
  /** Whether an element hides a part of a box, without three dots and a title that says the rest. */
  const cuts = (at, { overflowX, overflowY, textOverflow }, box, edge) => {
    const isWide = hides(overflowX) && (box.right > edge.right + 1 || box.left < edge.left - 1)
    const isHigh = hides(overflowY) && (box.bottom > edge.bottom + 2 || box.top < edge.top - 2)
    return isHigh || (isWide && !(textOverflow === 'ellipsis' && isTitled(at)))
  }
  /** The part of a box that is seen, and what around it cuts it: {box, cut}. */
  const clipped = (box, element, root) => {
    let [left, cut] = [box, null]
    for (const at of ancestors(element).reverse()) {
      const style = getComputedStyle(at)
      const edge = inner(at)
      if (cuts(at, style, left, edge)) cut ??= at
      if (style.overflowX !== 'visible') left = { ...left, ...sides(within(left, edge)) }
      if (style.overflowY !== 'visible') left = { ...left, ...ends(within(left, edge)) }
      if (isGone(left) || at === root) break
    }
    return { box: left, cut }
  }
  const sides = ({ left, right }) => ({ left, right })
  const ends = ({ top, bottom }) => ({ top, bottom })

  const textsOf = (root) => {
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT)
    const found = []
    while (walker.nextNode()) {
      const { currentNode: node } = walker
      if (node.textContent.trim() && shown(node.parentElement) && !node.parentElement.closest('option'))
        {found.push(node)}
    }
    return found
  }
  const boxesOf = (node) => {
    const range = document.createRange()
    range.selectNodeContents(node)
    return [...range.getClientRects()].filter((box) => !isGone(box))
  }
  const blockOf = (element) => {
    let at = element
    while (getComputedStyle(at).display.startsWith('inline') && at.tagName !== 'BUTTON') at = at.parentElement
    return at
  }

  const lookAtText = (node, root) => {
    const element = node.parentElement
    const what = named(element, node.textContent)
    contrast(element, getComputedStyle(element).color, TEXT, what)
    const block = blockOf(element)
    const edge = block.getBoundingClientRect()
    const isOpen = getComputedStyle(block).overflowX === 'visible' // where it hides, `clipped` says so
    return boxesOf(node).flatMap((box) => {
      if (isOpen && (box.right > edge.right + 1 || box.left < edge.left - 1)) mislaid.push(`spills ${what}`)
      const found = clipped(box, element, root)
      if (found.cut) mislaid.push(`cut ${what} by ${named(found.cut, '')}`)
      return isGone(found.box) ? [] : [{ element, box: found.box, what }]
    })
  }

  /** The width of a text in the font of a field. */
  const widthOf = (field, text) => {
    pen.font = getComputedStyle(field).font
    return pen.measureText(text).width
  }
  const lookAtField = (field) => {
    if (['checkbox', 'range', 'radio'].includes(field.type)) return
    const style = getComputedStyle(field)
    const room = field.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)
    if (field.value) contrast(field, style.color, TEXT, named(field, field.value))
    else if (field.placeholder) {
      const what = named(field, field.placeholder)
      const { color, opacity } = getComputedStyle(field, '::placeholder')
      contrast(field, faded(color, opacity), TEXT, what)
      if (widthOf(field, field.placeholder) > room + 1 && !isTitled(field)) mislaid.push(`cut ${what}`)
    }
    if (field.type === 'number' && widthOf(field, field.value) > room + 1)
      {mislaid.push(`cut ${named(field, field.value)}`)}
  }

  const lookAtChart = (canvas) => {
    const { color, borderTopColor } = getComputedStyle(canvas)
    const grid = parse(borderTopColor).join()
    const drawn = new Map((window.graftDrawn.get(canvas) ?? []).map((one) => [one.join(), one]))
    for (const [kind, style] of drawn.values()) {
      const isGrid = kind === 'line' && parse(style).join() === grid && style !== color // it only guides the eye
      if (!isGrid) contrast(canvas, style, kind === 'text' ? TEXT : MARK, `${kind} ${style} of a chart`)
    }
    return drawn.size
  }

  /** The samples of color before a text, and the line under the pointer. */
  const lookAtMarks = (element) => {
    const before = getComputedStyle(element, '::before')
    const isDrawn = before.content === '""' && parse(before.backgroundColor)[3] > 0
    if (isDrawn) contrast(element, before.backgroundColor, MARK, `sample of ${named(element, element.textContent)}`)
    if (!element.matches('.graft-bar > i, .graft-cursor')) return
    const { backgroundColor, opacity } = getComputedStyle(element)
    contrast(
      element.parentElement,
      faded(backgroundColor, opacity),
      MARK,
      `${element.parentElement.className} bar or line`,
    )
  }

  const lookAtRoom = (element, root) => {
    const { overflowX, textOverflow, display } = getComputedStyle(element)
    if (display === 'inline' || element.clientWidth === 0 || element.matches('input, select')) return
    const isWide = element.scrollWidth > element.clientWidth + 1 && overflowX !== 'visible'
    const isShort = textOverflow === 'ellipsis' && isTitled(element)
    const what = `${named(element, element.textContent)}: ${element.scrollWidth} > ${element.clientWidth}`
    if (isWide && !isShort) mislaid.push(`${scrolls(overflowX) ? 'sideways' : 'cut'} ${what}`)
    if (
      element === root &&
      element.matches('.graft-panel, .graft-stack') &&
      element.scrollHeight > element.clientHeight + 1
    ) {
      mislaid.push(`low ${named(element, '')}: ${element.scrollHeight} > ${element.clientHeight}`)
    }
  }

  const lookAtOverlaps = (boxes) => {
    for (const [index, one] of boxes.entries()) {
      for (const other of boxes.slice(index + 1)) {
        if (one.element.contains(other.element) || other.element.contains(one.element)) continue
        const common = within(one.box, other.box)
        const isLaidOver = common.right - common.left > 1.5 && common.bottom - common.top > 2
        if (isLaidOver && floats(one.element) === floats(other.element))
          {mislaid.push(`overlap ${one.what} and ${other.what}`)}
      }
    }
  }
  const floats = (element) => element.closest('.graft-tip')

  const dialog = [...document.querySelectorAll('dialog.graft[open]')].at(-1) // what lies below it cannot be reached
  const around = dialog ? [dialog] : [...document.querySelectorAll('.graft')]
  const roots = around.filter(
    (one) => shown(one) && one.getBoundingClientRect().width && !one.parentElement.closest('.graft'),
  )
  let texts = 0
  const lookAtElement = (element, root) => {
    lookAtRoom(element, root)
    lookAtMarks(element)
    if (element.matches('input, textarea, select')) lookAtField(element)
    if (element.matches('.graft-chart')) texts += lookAtChart(element)
  }
  const controlsOf = (elements, root) => {
    const found = elements
      .filter((one) => one.matches(CONTROLS))
      .map((element) => {
        const { box, cut } = clipped(element.getBoundingClientRect(), element, root)
        const what = named(element, element.textContent || element.value || element.alt || '')
        if (cut) mislaid.push(`cut ${what} by ${named(cut, '')}`)
        return { element, box, what }
      })
    return found.filter(({ box }) => !isGone(box))
  }
  const lookAtPlace = (root) => {
    const edge = root.getBoundingClientRect()
    const isOut = edge.left < 0 || edge.top < 0 || edge.right > innerWidth + 0.5 || edge.bottom > innerHeight + 0.5
    if (root.matches('dialog, .graft-popup, .graft-picker') && isOut) {
      mislaid.push(`beyond the window ${named(root, '')}`)
    }
    const node = root.closest('.lg-node')?.getBoundingClientRect()
    if (node && (edge.right > node.right + 1 || edge.left < node.left - 1)) {
      mislaid.push(`beyond its node ${named(root, '')}`)
    }
  }
  const look = (root) => {
    const elements = [root, ...root.querySelectorAll('*')].filter(shown)
    const found = textsOf(root)
    texts += found.length
    for (const element of elements) lookAtElement(element, root)
    lookAtOverlaps([...found.flatMap((node) => lookAtText(node, root)), ...controlsOf(elements, root)])
    lookAtPlace(root)
  }
  for (const root of roots) look(root)
  if (document.scrollingElement.scrollWidth > innerWidth) mislaid.push('the page scrolls sideways')
  return { contrasts, mislaid: [...new Set(mislaid)], texts }
}
