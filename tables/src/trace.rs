//! Traces: requests with the experts activated by each token, strongest first.

use std::ops::Range;

use half::f16;

use crate::container::{Container, Dtype, View};
use crate::trace_check::check_offsets;
use crate::{ExpertId, FormatError, LayerIdx, ModelInfo, Provenance, TokenId};

/// The finaliser of SplitMix64: every output bit depends on every input bit.
pub fn mix64(number: u64) -> u64 {
    let mixed = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Marks an unknown expert in memory and in builders, regardless of the file's element width.
pub const UNKNOWN_EXPERT: u16 = u16::MAX;
/// The `format` field of a trace.
pub(crate) const FORMAT: &str = "semmoe.trace";
const TENSORS: [&str; 5] = ["token_ids", "request_offsets", "experts", "prompt_lengths", "weights"];

/// A trace, validated when opened; memory-mapped or held in memory.
#[derive(Debug)]
pub struct Trace {
    container: Container,
    model: ModelInfo,
    provenance: Provenance,
    token_ids: View<u32>,
    offsets: View<u64>,
    prompt_lengths: Option<View<u32>>,
    experts: ExpertView,
    weights: Option<View<f16>>,
}

/// Expert ids in the element width of the file.
#[derive(Clone, Copy, Debug)]
pub enum ByWidth<N, W> {
    /// Bytes, for models with few experts.
    Narrow(N),
    /// 16 bits, for any model.
    Wide(W),
}

/// Rows of `experts` as stored: tokens x L x k ids, all k at the type's maximum where a route is unknown.
pub type ExpertRows<'a> = ByWidth<&'a [u8], &'a [u16]>;

type ExpertView = ByWidth<View<u8>, View<u16>>;

format_file!(Trace, FORMAT);

impl Trace {
    fn from_container(container: Container) -> Result<Self, FormatError> {
        let trace = Self::unchecked(container)?;
        trace.check_all()?;
        Ok(trace)
    }

    /// Checks everything except the contents of requests, which [`Trace::check_request`] checks.
    pub(crate) fn unchecked(container: Container) -> Result<Self, FormatError> {
        let (model, provenance) = container.about(FORMAT, &TENSORS)?;
        let tokens = container.len("token_ids")?;
        let routes = [tokens, model.layers() as u64, u64::from(model.top_k)];
        let Some(requests) = container.len("request_offsets")?.checked_sub(1) else {
            return Err(FormatError::shape("request_offsets", "[0]", "at least one offset"));
        };
        let optional = |name| container.has(name).then_some(name);
        let trace = Trace {
            token_ids: container.view("token_ids", &[tokens])?,
            offsets: container.view("request_offsets", &[requests + 1])?,
            prompt_lengths: optional("prompt_lengths").map(|n| container.view(n, &[requests])).transpose()?,
            experts: expert_view(&container, &model, &routes)?,
            weights: optional("weights").map(|n| container.view(n, &routes)).transpose()?,
            container,
            model,
            provenance,
        };
        check_offsets(trace.all_offsets(), trace.tokens())?;
        Ok(trace)
    }

    /// R: the number of requests.
    pub fn requests(&self) -> usize {
        self.all_offsets().len() - 1
    }

    /// n: the number of tokens over all requests.
    pub fn tokens(&self) -> usize {
        self.all_token_ids().len()
    }

    /// Request `r`.
    ///
    /// # Panics
    /// If `r` is not below [`Trace::requests`].
    pub fn request(&self, r: usize) -> TraceRequest<'_> {
        let tokens = self.token_range(r);
        let prompt_len = match &self.prompt_lengths {
            Some(view) => self.container.slice(view)[r] as usize,
            None => tokens.len(),
        };
        TraceRequest { trace: self, first: tokens.start, token_ids: &self.all_token_ids()[tokens], prompt_len }
    }

    /// Iterates over all requests in file order.
    pub fn iter(&self) -> impl Iterator<Item = TraceRequest<'_>> {
        (0..self.requests()).map(|r| self.request(r))
    }

    /// Whether the trace contains router weights.
    pub fn has_weights(&self) -> bool {
        self.weights.is_some()
    }

    /// Returns the SHA-256 over the tensors as lower-case hex.
    pub fn digest(&self) -> String {
        self.container.digest().to_owned()
    }

    pub(crate) fn k(&self) -> usize {
        usize::from(self.model.top_k)
    }

    pub(crate) fn all_token_ids(&self) -> &[u32] {
        self.container.slice(&self.token_ids)
    }

    pub(crate) fn all_offsets(&self) -> &[u64] {
        self.container.slice(&self.offsets)
    }

    pub(crate) fn token_range(&self, r: usize) -> Range<usize> {
        let offsets = self.all_offsets();
        offsets[r] as usize..offsets[r + 1] as usize
    }

    /// Returns the rows [n, L, k] of a range of tokens.
    pub(crate) fn rows(&self, tokens: Range<usize>) -> ExpertRows<'_> {
        let row = self.model.layers() * self.k();
        self.ids(tokens.start * row..tokens.end * row)
    }

    fn ids(&self, span: Range<usize>) -> ExpertRows<'_> {
        match &self.experts {
            ExpertView::Narrow(view) => ExpertRows::Narrow(&self.container.slice(view)[span]),
            ExpertView::Wide(view) => ExpertRows::Wide(&self.container.slice(view)[span]),
        }
    }

    pub(crate) fn all_prompt_lengths(&self) -> Option<&[u32]> {
        self.prompt_lengths.as_ref().map(|view| self.container.slice(view))
    }

    pub(crate) fn all_weights(&self) -> Option<&[f16]> {
        self.weights.as_ref().map(|view| self.container.slice(view))
    }

    /// Releases the pages of a range of tokens until the next access.
    pub(crate) fn release(&self, tokens: Range<usize>) {
        let row = self.model.layers() * self.k();
        let elements = tokens.start * row..tokens.end * row;
        self.container.release(&self.token_ids, tokens);
        match &self.experts {
            ExpertView::Narrow(view) => self.container.release(view, elements.clone()),
            ExpertView::Wide(view) => self.container.release(view, elements.clone()),
        }
        if let Some(view) = &self.weights {
            self.container.release(view, elements);
        }
    }
}

/// One request of a trace.
#[derive(Clone, Copy, Debug)]
pub struct TraceRequest<'a> {
    trace: &'a Trace,
    first: usize,
    token_ids: &'a [u32],
    prompt_len: usize,
}

impl<'a> TraceRequest<'a> {
    /// Returns the token ids, prompt first.
    pub fn token_ids(&self) -> &'a [u32] {
        self.token_ids
    }

    /// Iterates over the tokens with their positions.
    pub fn tokens(&self) -> impl Iterator<Item = (usize, TokenId)> + use<'a> {
        self.token_ids.iter().map(|token| TokenId::new(*token)).enumerate()
    }

    /// Number of prompt tokens; the rest were decoded. Equals the number of tokens if the file does not specify it.
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// Whether the route of the token at `position` is known in any layer.
    ///
    /// # Panics
    /// If `position` is not below the number of tokens.
    pub fn is_routed(&self, position: usize) -> bool {
        self.routes(position).next().is_some()
    }

    /// Iterates over the known routes of the token at `position`, with their layers.
    ///
    /// # Panics
    /// If `position` is not below the number of tokens.
    pub fn routes(&self, position: usize) -> impl Iterator<Item = (LayerIdx, Route<'a>)> + use<'a> {
        let request = *self;
        let layers = LayerIdx::all(self.trace.model.layers());
        layers.filter_map(move |layer| Some((layer, request.route(position, layer)?)))
    }

    /// Returns the route of the token at `position` in a layer, or `None` if unknown.
    ///
    /// # Panics
    /// If `position` is not below the number of tokens, or `layer` not below L.
    pub fn route(&self, position: usize, layer: LayerIdx) -> Option<Route<'a>> {
        let trace = self.trace;
        assert!(position < self.token_ids.len() && layer.index() < trace.model.layers());
        let row = (self.first + position) * trace.model.layers() + layer.index();
        let span = row * trace.k()..(row + 1) * trace.k();
        let ids = trace.ids(span.clone());
        let known = match ids {
            ExpertRows::Narrow(ids) => ids[0] != u8::MAX,
            ExpertRows::Wide(ids) => ids[0] != u16::MAX,
        };
        let weights = trace.weights.as_ref().map(|view| &trace.container.slice(view)[span]);
        known.then_some(Route { ids, weights })
    }
}

/// The k experts of one token in one layer.
#[derive(Clone, Copy, Debug)]
pub struct Route<'a> {
    ids: ExpertRows<'a>,
    weights: Option<&'a [f16]>,
}

impl<'a> Route<'a> {
    /// Iterates over the experts, strongest first, all distinct.
    pub fn experts(&self) -> impl ExactSizeIterator<Item = ExpertId> + Clone + use<'a> {
        let ids = self.ids;
        let k = match ids {
            ExpertRows::Narrow(ids) => ids.len(),
            ExpertRows::Wide(ids) => ids.len(),
        };
        (0..k).map(move |at| match ids {
            ExpertRows::Narrow(ids) => ExpertId::new(ids[at].into()),
            ExpertRows::Wide(ids) => ExpertId::new(ids[at]),
        })
    }

    /// Returns the router's weights in the same order as the experts, if the file contains them.
    pub fn weights(&self) -> Option<&'a [f16]> {
        self.weights
    }
}

/// Whether experts are stored as bytes for this model; readers accept the wide form for any model.
pub(crate) fn narrow(model: &ModelInfo) -> bool {
    model.num_experts <= u16::from(u8::MAX)
}

fn expert_view(container: &Container, model: &ModelInfo, shape: &[u64]) -> Result<ExpertView, FormatError> {
    match container.dtype("experts")? {
        Dtype::U8 if narrow(model) => Ok(ExpertView::Narrow(container.view("experts", shape)?)),
        Dtype::U16 => Ok(ExpertView::Wide(container.view("experts", shape)?)),
        other => Err(FormatError::WrongDtype {
            tensor: "experts",
            found: other.name().into(),
            expected: if narrow(model) { "U8 or U16" } else { "U16" }.into(),
        }),
    }
}
