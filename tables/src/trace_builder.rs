//! Builds traces request by request; every request is checked when pushed.

use std::path::Path;

use half::f16;

use crate::container::{Data, Dtype, Layout, LayoutTensor};
use crate::trace::{ByWidth, FORMAT, narrow};
use crate::trace_check::{RequestCheck, VALID_WEIGHT, check_prompt_len, check_token_ids, valid_weight};
use crate::{FormatError, LayerIdx, ModelInfo, Provenance, Trace, TraceRequest, UNKNOWN_EXPERT};

/// Collects requests into a trace, in the order pushed.
#[derive(Debug)]
pub struct TraceBuilder {
    model: ModelInfo,
    pub(crate) provenance: Provenance,
    token_ids: Vec<u32>,
    offsets: Vec<u64>,
    prompt_lengths: Vec<u32>,
    experts: ByWidth<Vec<u8>, Vec<u16>>,
    /// `None` until the first request shows whether there are weights.
    weights: Option<Option<Vec<f16>>>,
}

impl TraceBuilder {
    /// Starts an empty trace.
    ///
    /// # Errors
    /// If the model is invalid.
    pub fn new(model: ModelInfo, provenance: Provenance) -> Result<Self, FormatError> {
        model.validate()?;
        provenance.validate()?;
        let experts = if narrow(&model) { ByWidth::Narrow(Vec::new()) } else { ByWidth::Wide(Vec::new()) };
        Ok(TraceBuilder {
            model,
            provenance,
            token_ids: Vec::new(),
            offsets: vec![0],
            prompt_lengths: Vec::new(),
            experts,
            weights: None,
        })
    }

    /// Adds a request of n tokens, the first `prompt_len` of which are the prompt. `experts` is [n, L, k], strongest
    /// first; all k ids of a layer are [`UNKNOWN_EXPERT`] if its route is unknown. `weights` is [n, L, k], for all
    /// requests or for none. After an error the trace is unchanged.
    ///
    /// # Errors
    /// Names the problem: wrong lengths, ids out of range, repeated experts, or weights that are not finite.
    pub fn push(
        &mut self,
        token_ids: &[u32],
        prompt_len: u32,
        experts: &[u16],
        weights: Option<&[f16]>,
    ) -> Result<(), FormatError> {
        self.check(token_ids, prompt_len, experts)?;
        self.push_weights(token_ids.len(), experts, weights)?;
        self.token_ids.extend_from_slice(token_ids);
        self.offsets.push(self.token_ids.len() as u64);
        self.prompt_lengths.push(prompt_len);
        match &mut self.experts {
            // Ids are below 255 or UNKNOWN_EXPERT, whose low byte is the narrow maximum.
            ByWidth::Narrow(column) => column.extend(experts.iter().map(|&id| id as u8)),
            ByWidth::Wide(column) => column.extend_from_slice(experts),
        }
        Ok(())
    }

    /// Checks a request without weights as [`TraceBuilder::push`] does, without adding it.
    ///
    /// # Errors
    /// See [`TraceBuilder::push`].
    pub fn check(&self, token_ids: &[u32], prompt_len: u32, experts: &[u16]) -> Result<(), FormatError> {
        check_token_ids(&self.model, token_ids, 0)?;
        check_prompt_len(prompt_len, token_ids.len(), "the request")?;
        self.check_len("experts", token_ids.len(), experts.len())?;
        RequestCheck::new(&self.model).check_rows(experts, UNKNOWN_EXPERT, &self.model, 0)
    }

    fn check_len(&self, tensor: &'static str, tokens: usize, found: usize) -> Result<(), FormatError> {
        let [layers, k] = self.model.route_shape();
        if tokens.checked_mul(layers * k) == Some(found) {
            return Ok(());
        }
        Err(FormatError::shape(tensor, format!("{found} elements"), format!("[{tokens}, {layers}, {k}]")))
    }

    fn push_weights(&mut self, tokens: usize, experts: &[u16], weights: Option<&[f16]>) -> Result<(), FormatError> {
        if let Some(weights) = weights {
            self.check_len("weights", tokens, weights.len())?;
            if let Some(at) = weights.iter().position(|&w| !valid_weight(w)) {
                return Err(FormatError::value("weights", format!("element {at}"), weights[at], VALID_WEIGHT));
            }
        }
        let column = self.weights.get_or_insert_with(|| weights.map(|_| Vec::new()));
        match (column, weights) {
            (None, None) => {}
            (Some(column), Some(weights)) => {
                // Weights of unknown routes are set to zero, so that equal traces have equal bytes.
                let known = |(&weight, &id)| if id == UNKNOWN_EXPERT { f16::ZERO } else { weight };
                column.extend(weights.iter().zip(experts).map(known));
            }
            (column, _) => {
                let (found, expected) = if column.is_some() { ("none", "weights") } else { ("weights", "none") };
                let expected = format!("{expected}, as in the previous requests");
                return Err(FormatError::value("weights", "the request", found, expected));
            }
        }
        Ok(())
    }

    /// Number of requests so far.
    pub fn requests(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Number of tokens so far.
    pub fn tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// Returns the model passed to [`TraceBuilder::new`].
    pub fn model(&self) -> &ModelInfo {
        &self.model
    }

    /// Writes the trace to a file atomically; returns the digest.
    ///
    /// # Errors
    /// [`FormatError::Io`] names the path.
    pub fn write(&self, path: &Path) -> Result<String, FormatError> {
        self.layout().write(path)
    }

    /// Encodes the file.
    ///
    /// # Errors
    /// If the header would exceed a reader's limit.
    pub fn to_bytes(&self) -> Result<Vec<u8>, FormatError> {
        self.layout().to_bytes()
    }

    /// Builds the trace in memory.
    ///
    /// # Errors
    /// See [`TraceBuilder::to_bytes`].
    pub fn finish(self) -> Result<Trace, FormatError> {
        let bytes = self.to_bytes()?;
        drop(self);
        Trace::from_bytes(bytes)
    }

    /// Copies the requests accepted by `keep` (given the request's number and the request), in order.
    ///
    /// # Errors
    /// See [`TraceBuilder::to_bytes`].
    pub fn select(trace: &Trace, keep: impl Fn(usize, TraceRequest<'_>) -> bool) -> Result<Trace, FormatError> {
        let mut builder = TraceBuilder::new(trace.model().clone(), trace.provenance().clone())?;
        for (_, request) in trace.iter().enumerate().filter(|(number, request)| keep(*number, *request)) {
            builder.push_request(request, trace.has_weights())?;
        }
        builder.finish()
    }

    /// Adds a request of another trace of the same model.
    fn push_request(&mut self, request: TraceRequest<'_>, has_weights: bool) -> Result<(), FormatError> {
        let [layers, k] = self.model.route_shape();
        let mut experts = Vec::with_capacity(request.token_ids().len() * layers * k);
        let mut weights = has_weights.then(Vec::new);
        for position in 0..request.token_ids().len() {
            for layer in 0..layers {
                let route = request.route(position, LayerIdx::new(layer as u16));
                match route {
                    Some(route) => experts.extend(route.experts().map(crate::ExpertId::get)),
                    None => experts.extend(std::iter::repeat_n(UNKNOWN_EXPERT, k)),
                }
                if let Some(weights) = &mut weights {
                    match route.and_then(|route| route.weights()) {
                        Some(known) => weights.extend_from_slice(known),
                        None => weights.extend(std::iter::repeat_n(f16::ZERO, k)),
                    }
                }
            }
        }
        let prompt_len = request.prompt_len();
        let prompt_len = u32::try_from(prompt_len)
            .map_err(|_| FormatError::field("prompt_lengths", prompt_len, "at most 4294967295"))?;
        self.push(request.token_ids(), prompt_len, &experts, weights.as_deref())
    }

    fn layout(&self) -> Layout<'_> {
        let weights = self.weights.as_ref().and_then(Option::as_deref);
        let tensors = TraceTensors {
            offsets: &self.offsets,
            prompt_lengths: &self.prompt_lengths,
            token_ids: self.token_ids.as_slice().into(),
            experts: match &self.experts {
                ByWidth::Narrow(column) => column.as_slice().into(),
                ByWidth::Wide(column) => column.as_slice().into(),
            },
            weights: weights.map(Data::from),
        };
        tensors.layout(&self.model, &self.provenance)
    }
}

/// The tensors of a trace, in memory or on disk.
pub(crate) struct TraceTensors<'a> {
    /// [requests + 1]
    pub(crate) offsets: &'a [u64],
    /// [requests]
    pub(crate) prompt_lengths: &'a [u32],
    /// [tokens], u32
    pub(crate) token_ids: Data<'a>,
    /// [tokens, L, k], u8 or u16
    pub(crate) experts: Data<'a>,
    /// [tokens, L, k], f16
    pub(crate) weights: Option<Data<'a>>,
}

impl<'a> TraceTensors<'a> {
    pub(crate) fn layout(self, model: &ModelInfo, provenance: &Provenance) -> Layout<'a> {
        let metadata = Layout::metadata(FORMAT, model, provenance);
        let tokens = self.offsets.last().copied().unwrap_or_default() as usize;
        let shape = [tokens, model.layers(), usize::from(model.top_k)];
        let expert = if narrow(model) { Dtype::U8 } else { Dtype::U16 };
        let mut tensors = vec![
            LayoutTensor::of("token_ids", Dtype::U32, &[tokens], self.token_ids),
            LayoutTensor::new("request_offsets", &[self.offsets.len()], self.offsets),
            LayoutTensor::new("prompt_lengths", &[self.prompt_lengths.len()], self.prompt_lengths),
            LayoutTensor::of("experts", expert, &shape, self.experts),
        ];
        tensors.extend(self.weights.map(|weights| LayoutTensor::of("weights", Dtype::F16, &shape, weights)));
        Layout { metadata, tensors }
    }
}
