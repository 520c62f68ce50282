const PREVIEW = 226 // by which the editor makes a sampler higher while it draws
const RIM = 5 // of a node, under which a wire may touch it

/**
 * What is wrong with how the graph that is shown is laid out and drawn: nodes that lie over others or over the edge of a
 * group, also when a sampler has grown by its preview, groups over groups, wires that the canvas has drawn under nodes, and
 * texts of a node (title, labels of settings and sockets) that are cut, leave the node or lie over each other. Returns
 * [what].
 */
export function measureGraph(modern) {
  const { canvas } = window.app
  const { LiteGraph } = window
  const wrong = []
  const named = (node) => `“${node.getTitle?.() ?? node.title}” (${node.id})`

  // --- places ----------------------------------------------------------------------------------------------------------

  const drawn = (node) => document.querySelector(`[data-node-id="${CSS.escape(String(node.id))}"]`)
  /** The box of a node in the graph: with its title, and as it is on the page where nodes are elements. */
  const boxOf = (node) => {
    const [x, y] = node.pos
    const title = LiteGraph.NODE_TITLE_HEIGHT
    const grown = node.type.startsWith('KSampler') ? node.computeSize()[1] + PREVIEW : 0
    const box = { left: x, top: y - title, right: x + node.size[0], bottom: y + Math.max(node.size[1], grown) }
    if (node.flags.collapsed) return { ...box, right: x + node._collapsed_width, bottom: y }
    const seen = modern && drawn(node)?.getBoundingClientRect()
    if (!seen?.width) return box
    const { scale } = canvas.ds
    return { ...box, right: x + seen.width / scale, bottom: Math.max(box.bottom, box.top + seen.height / scale) }
  }
  const groupBox = ({ pos, size }) => ({ left: pos[0], top: pos[1], right: pos[0] + size[0], bottom: pos[1] + size[1] })
  const within = (inner, outer) =>
    inner.left >= outer.left && inner.right <= outer.right && inner.top >= outer.top && inner.bottom <= outer.bottom
  const meet = (one, other) =>
    one.left < other.right - 1 && other.left < one.right - 1 && one.top < other.bottom - 1 && other.top < one.bottom - 1

  const pairs = (all) => all.flatMap((one, at) => all.slice(at + 1).map((other) => [one, other]))
  const lookAtPlaces = ({ nodes, groups }) => {
    const boxes = nodes.map((node) => ({ ...boxOf(node), what: named(node) }))
    const frames = groups.map((group) => ({ ...groupBox(group), what: `group “${group.title}”`, group }))
    for (const [one, other] of pairs(boxes)) {
      if (meet(one, other)) wrong.push(`${one.what} over ${other.what}, by ${Math.ceil(one.bottom - other.top)}`)
    }
    for (const [one, other] of pairs(frames)) {
      if (meet(one, other) && !within(one, other) && !within(other, one)) wrong.push(`${one.what} over ${other.what}`)
    }
    for (const frame of frames) lookAtFrame(frame, boxes)
  }
  const lookAtFrame = (frame, boxes) => {
    const { title, titleHeight, font_size: size } = frame.group
    const inner = { ...frame, top: frame.top + (titleHeight ?? size * 1.4) }
    for (const box of boxes) {
      if (!meet(box, frame) || within(box, inner)) continue
      wrong.push(`${box.what} over the edge of ${frame.what}, by ${Math.ceil(box.bottom - inner.bottom)}`)
    }
    const pen = document.createElement('canvas').getContext('2d')
    pen.font = `${size}px ${LiteGraph.GROUP_FONT ?? 'Arial'}`
    const width = pen.measureText(title).width + 4
    if (width > frame.right - frame.left) wrong.push(`the title of ${frame.what} is wider than it: ${width}`)
  }

  // --- wires of the classic canvas --------------------------------------------------------------------------------------

  const pointsAround = ({ left, top, right, bottom }) => {
    const points = []
    for (let x = left + RIM; x < right - RIM; x += 2) points.push([x, top + RIM], [x, bottom - RIM])
    for (let y = top + RIM; y < bottom - RIM; y += 2) points.push([left + RIM, y], [right - RIM, y])
    return points
  }
  const pathsOf = (link, graph) => {
    const paths = [link.path]
    for (let dot = graph.reroutes?.get(link.parentId); dot; dot = graph.reroutes.get(dot.parentId)) paths.push(dot.path)
    return paths.filter(Boolean)
  }
  const lookAtWires = (graph) => {
    const pen = document.createElement('canvas').getContext('2d')
    pen.lineWidth = 4
    const links = [...graph.links.values()]
    for (const node of graph.nodes) {
      const points = pointsAround(boxOf(node))
      for (const link of links) {
        if ([link.origin_id, link.target_id].includes(node.id)) continue
        const isUnder = pathsOf(link, graph).some((path) => points.some(([x, y]) => pen.isPointInStroke(path, x, y)))
        const [from, to] = [link.origin_id, link.target_id].map((id) => graph.getNodeById(id))
        if (isUnder && from && to) wrong.push(`a wire from ${named(from)} to ${named(to)} passes under ${named(node)}`)
      }
    }
    return links.filter((link) => pathsOf(link, graph).length).length
  }

  // --- texts of the classic canvas --------------------------------------------------------------------------------------

  /** A pen that notes the texts that are drawn with it: [{text, left, right, top, bottom}]. */
  const notingPen = () => {
    const pen = document.createElement('canvas').getContext('2d')
    const noted = []
    pen.fillText = (text, x, y) => {
      if (!String(text).trim()) return
      const { width, actualBoundingBoxAscent: up, actualBoundingBoxDescent: down } = pen.measureText(text)
      const from = { center: x - width / 2, right: x - width, end: x - width }[pen.textAlign] ?? x
      noted.push({ text: String(text), left: from, right: from + width, top: y - up, bottom: y + down })
    }
    return { pen, noted }
  }
  const labelsOf = (node) =>
    [
      node.getTitle(),
      ...[...(node.widgets ?? []), ...(node.inputs ?? []), ...(node.outputs ?? [])].map(labelOf),
    ].filter(Boolean)
  const labelOf = ({ label, localized_name: local, name }) => label ?? local ?? name
  const isCut = (text, labels) => {
    const begun = text.replace(/(…|\.\.\.)$/, '')
    return begun && begun !== text && !labels.includes(text) && labels.some((label) => label.startsWith(begun))
  }
  const lookAtDrawing = (node) => {
    const { pen, noted } = notingPen()
    const { badges } = node
    node.badges = [] // of the front end, above the title
    canvas.drawNode(node, pen)
    node.badges = badges
    const labels = labelsOf(node)
    for (const { text, left, right } of noted) {
      if (isCut(text, labels)) wrong.push(`cut in ${named(node)}: ${text}`)
      if (left < -1 || right > node.size[0] + 1) wrong.push(`beyond ${named(node)}: ${text}`)
    }
    for (const [one, other] of pairs(noted)) {
      if (meet(one, other)) wrong.push(`over each other in ${named(node)}: ${one.text} and ${other.text}`)
    }
    return noted.length
  }

  // --- texts of Nodes 2.0 -----------------------------------------------------------------------------------------------

  const lookAtElements = (node) => {
    const around = drawn(node)
    if (!around) {
      wrong.push(`${named(node)} is not on the page`)
      return 0
    }
    const labels = labelsOf(node)
    const texts = [...around.querySelectorAll('*')].filter((one) => labels.includes(one.textContent.trim()))
    for (const one of texts) {
      const isHidden = !one.checkVisibility({ visibilityProperty: true, opacityProperty: true })
      if (isHidden || one.closest('.graft') || getComputedStyle(one).display === 'inline') continue
      const isWide = one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).overflowX !== 'visible'
      if (isWide) {
        wrong.push(`cut in ${named(node)}: ${one.textContent.trim()} (${one.clientWidth} of ${one.scrollWidth})`)
      }
    }
    return texts.length
  }

  const { graph } = canvas
  lookAtPlaces({ nodes: graph.nodes, groups: graph.groups ?? graph._groups })
  const wires = modern ? 0 : lookAtWires(graph)
  const texts = graph.nodes.map((node) => (modern ? lookAtElements(node) : lookAtDrawing(node)))
  return { wrong: [...new Set(wrong)], wires, texts: texts.reduce((sum, one) => sum + one, 0) }
}
