export class LiveView { constructor(s){ s.textContent="live"; } enter(){} }
