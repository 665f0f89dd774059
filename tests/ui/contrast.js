// Texts whose contrast is below AA, and how many texts were looked at. Colours with alpha are laid over what is behind them.
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = colour => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => top.slice(0, 3).map((value, at) => value * top[3] + below[at] * (1 - top[3]));
  const background = node => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(rgba(getComputedStyle(at).backgroundColor));
    return layers.reduceRight((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const light = colour => {
    const [r, g, b] = colour.map(value => value / 255).map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const poor = [];
  let count = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || ["SCRIPT", "STYLE"].includes(node.tagName) || !node.checkVisibility()) continue;
    const style = getComputedStyle(node), behind = background(node);
    const colour = over(rgba(node instanceof SVGElement ? style.fill : style.color), behind);
    const [high, low] = [light(colour), light(behind)].sort((a, b) => b - a), size = parseFloat(style.fontSize);
    const needed = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5, found = (high + 0.05) / (low + 0.05);
    count += 1;
    if (found < needed) poor.push(`${text.slice(0, 40)}: ${found.toFixed(2)}`);
  }
  return [poor, count];
})()
