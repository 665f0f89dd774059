//! Builds profiles from traces and other profiles. Addition is associative and commutative.

use std::collections::BTreeMap;
use std::path::Path;

use crate::container::{Data, Dtype, Layout, LayoutTensor};
use crate::profile::{FORMAT, add_tokens};
use crate::{FormatError, LayerIdx, ModelInfo, Phase, Profile, Provenance, Trace};

/// Sums activations. After an error, the builder contains a partial sum and should be dropped.
#[derive(Debug)]
pub struct ProfileBuilder {
    model: ModelInfo,
    provenance: Provenance,
    phase: Phase,
    /// Contains only tokens that occurred, so that memory grows with the evidence and not with the vocabulary.
    tokens: BTreeMap<u32, TokenEvidence>,
    entries: usize,
}

#[derive(Debug, Clone)]
struct TokenEvidence {
    occurrences: u64,
    /// Per layer: (expert, count), ascending by expert.
    layers: Vec<Vec<(u16, u32)>>,
}

impl ProfileBuilder {
    /// Starts an empty profile. Unknown model fields (tokenizer hash, number of layers) are taken from the first input
    /// that specifies them.
    ///
    /// # Errors
    /// If the model is invalid.
    pub fn new(model: ModelInfo, provenance: Provenance, phase: Phase) -> Result<Self, FormatError> {
        model.validate()?;
        provenance.validate()?;
        Ok(ProfileBuilder { model, provenance, phase, tokens: BTreeMap::new(), entries: 0 })
    }

    /// Starts an empty profile with the model, provenance and phase of another.
    ///
    /// # Errors
    /// See [`ProfileBuilder::new`].
    pub fn like(profile: &Profile) -> Result<Self, FormatError> {
        Self::new(profile.model().clone(), profile.provenance().clone(), profile.phase())
    }

    /// Counts the tokens of a trace that belong to the builder's phase and have a known route in at least one layer.
    ///
    /// # Errors
    /// If the trace belongs to a different model or a count overflows.
    pub fn add_trace(&mut self, trace: &Trace) -> Result<(), FormatError> {
        self.model.adopt(trace.model())?;
        for request in trace.iter() {
            let prompt = request.prompt_len();
            let positions = match self.phase {
                Phase::Prefill => 0..prompt,
                Phase::Decode => prompt..request.token_ids().len(),
                Phase::All => 0..request.token_ids().len(),
            };
            for position in positions.filter(|&position| request.is_routed(position)) {
                let token = request.token_ids()[position];
                let evidence = evidence_of(&mut self.tokens, token, self.model.layers());
                evidence.add_occurrences(token, 1)?;
                for (layer, route) in request.routes(position) {
                    for expert in route.experts() {
                        self.entries += usize::from(evidence.add(layer.index(), token, expert.get(), 1)?);
                    }
                }
            }
        }
        Ok(())
    }

    /// Adds the counts of another profile.
    ///
    /// # Errors
    /// If the profile belongs to a different model or phase, or a count overflows.
    pub fn add_profile(&mut self, profile: &Profile) -> Result<(), FormatError> {
        self.model.adopt(profile.model())?;
        if profile.phase() != self.phase {
            return Err(FormatError::PhaseMismatch { found: profile.phase(), expected: self.phase });
        }
        for (id, occurrences) in profile.seen() {
            let (layers, token) = (LayerIdx::all(self.model.layers()), id.get());
            let evidence = evidence_of(&mut self.tokens, token, self.model.layers());
            evidence.add_occurrences(token, occurrences)?;
            for layer in layers {
                for (expert, count) in profile.row(layer, id).iter() {
                    self.entries += usize::from(evidence.add(layer.index(), token, expert, count)?);
                }
            }
        }
        Ok(())
    }

    /// Returns the number of stored counts, one per token, layer and expert that occurred together. Each takes 8 bytes
    /// of memory, and twice that while rows grow.
    pub fn entries(&self) -> usize {
        self.entries
    }

    /// Writes the profile to a file atomically; returns the digest.
    ///
    /// # Errors
    /// [`FormatError::Io`] names the path.
    pub fn write(&self, path: &Path) -> Result<String, FormatError> {
        let columns = self.columns().map_err(|e| e.in_file(path))?;
        columns.layout(&self.model, &self.provenance, self.phase).write(path)
    }

    /// Encodes the file.
    ///
    /// # Errors
    /// If the total number of tokens exceeds 48 bits, or the header would exceed a reader's limit.
    pub fn to_bytes(&self) -> Result<Vec<u8>, FormatError> {
        self.columns()?.layout(&self.model, &self.provenance, self.phase).to_bytes()
    }

    /// Builds the profile in memory.
    ///
    /// # Errors
    /// See [`ProfileBuilder::to_bytes`].
    pub fn finish(self) -> Result<Profile, FormatError> {
        let bytes = self.to_bytes()?;
        drop(self);
        Profile::from_bytes(bytes)
    }

    fn columns(&self) -> Result<Columns, FormatError> {
        let vocabulary = self.model.vocab_size as usize;
        let mut columns = Columns { token_count: vec![0; vocabulary], ..Columns::default() };
        let mut total = 0u64;
        for (&token, evidence) in &self.tokens {
            columns.token_count[token as usize] = evidence.occurrences;
            total = add_tokens(total, evidence.occurrences)?;
        }
        columns.indptr.reserve_exact(self.model.layers() * (vocabulary + 1));
        for layer in 0..self.model.layers() {
            for (&token, evidence) in &self.tokens {
                columns.start_rows_up_to(layer * (vocabulary + 1) + token as usize);
                columns.expert.extend(evidence.layers[layer].iter().map(|(expert, _)| expert));
                columns.count.extend(evidence.layers[layer].iter().map(|(_, count)| count));
            }
            columns.start_rows_up_to(layer * (vocabulary + 1) + vocabulary);
        }
        Ok(columns)
    }
}

/// Returns the counts of a token, creating empty ones for `layers` layers if missing.
fn evidence_of(tokens: &mut BTreeMap<u32, TokenEvidence>, token: u32, layers: usize) -> &mut TokenEvidence {
    tokens.entry(token).or_insert_with(|| TokenEvidence { occurrences: 0, layers: vec![Vec::new(); layers] })
}

impl TokenEvidence {
    fn add_occurrences(&mut self, token: u32, n: u64) -> Result<(), FormatError> {
        let sum = self.occurrences.checked_add(n);
        self.occurrences =
            sum.ok_or_else(|| FormatError::CountOverflow { what: format!("token {token}"), bits: 64 })?;
        Ok(())
    }

    /// Adds to a count; returns whether the expert is new.
    fn add(&mut self, layer: usize, token: u32, expert: u16, n: u32) -> Result<bool, FormatError> {
        let row = &mut self.layers[layer];
        match row.binary_search_by_key(&expert, |(expert, _)| *expert) {
            Err(at) => {
                row.insert(at, (expert, n));
                Ok(true)
            }
            Ok(at) => {
                let overflow = || FormatError::CountOverflow {
                    what: format!("expert {expert} in layer {layer} for token {token}"),
                    bits: 32,
                };
                row[at].1 = row[at].1.checked_add(n).ok_or_else(overflow)?;
                Ok(false)
            }
        }
    }
}

/// The tensors of the file.
#[derive(Debug, Default)]
pub(crate) struct Columns {
    pub(crate) token_count: Vec<u64>,
    pub(crate) indptr: Vec<u64>,
    pub(crate) expert: Vec<u16>,
    pub(crate) count: Vec<u32>,
}

impl Columns {
    /// Makes all rows up to this index of `indptr` start at the current number of entries.
    pub(crate) fn start_rows_up_to(&mut self, index: usize) {
        self.indptr.resize(index + 1, self.expert.len() as u64);
    }

    pub(crate) fn layout(&self, model: &ModelInfo, provenance: &Provenance, phase: Phase) -> Layout<'_> {
        let (expert, count) = (self.expert.as_slice().into(), self.count.as_slice().into());
        ProfileTensors { token_count: &self.token_count, indptr: &self.indptr, expert, count }
            .layout(model, provenance, phase)
    }
}

/// The tensors of a profile, in memory or on disk.
pub(crate) struct ProfileTensors<'a> {
    /// [V]
    pub(crate) token_count: &'a [u64],
    /// [L, V + 1]
    pub(crate) indptr: &'a [u64],
    /// [entries], u16
    pub(crate) expert: Data<'a>,
    /// [entries], u32
    pub(crate) count: Data<'a>,
}

impl<'a> ProfileTensors<'a> {
    pub(crate) fn layout(self, model: &ModelInfo, provenance: &Provenance, phase: Phase) -> Layout<'a> {
        let mut metadata = Layout::metadata(FORMAT, model, provenance);
        metadata.insert("phase".into(), phase.to_string());
        let vocabulary = self.token_count.len();
        let entries = self.indptr.last().copied().unwrap_or_default() as usize;
        let tensors = vec![
            LayoutTensor::new("token_count", &[vocabulary], self.token_count),
            LayoutTensor::new("indptr", &[model.layers(), vocabulary + 1], self.indptr),
            LayoutTensor::of("expert", Dtype::U16, &[entries], self.expert),
            LayoutTensor::of("count", Dtype::U32, &[entries], self.count),
        ];
        Layout { metadata, tensors }
    }
}
