//! Small tables over the bundled model's tokenizer.

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use half::f16;
use semmoe_tables::{ModelInfo, Placement, Provenance, Replicas, TablesBuilder};
use semmoe_text::Tokenizer;
use serde_json::{Value, json};
use tempfile::TempDir;

/// The model whose tokenizer and chat template the tests use.
pub(crate) const MODEL_DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m");

const LAYERS: u16 = 7;
const EXPERTS: u16 = 32;

/// Read once for all tests: that takes longer than most of them.
pub(crate) fn tokenizer() -> Arc<Tokenizer> {
    static READ: LazyLock<Arc<Tokenizer>> =
        LazyLock::new(|| Arc::new(Tokenizer::from_file(&Path::new(MODEL_DIR).join("tokenizer.json")).unwrap()));
    Arc::clone(&READ)
}

/// A folder of tables for one model.
pub(crate) struct Fixture {
    pub(crate) folder: TempDir,
    tokenizer: Arc<Tokenizer>,
    pub model: ModelInfo,
    pub(crate) ranks: u16,
}

impl Fixture {
    pub(crate) fn new(ranks: u16) -> Self {
        let tokenizer = tokenizer();
        let model = ModelInfo {
            model: "tiny".to_owned(),
            tokenizer_sha256: Some(tokenizer.sha256().to_owned()),
            num_experts: EXPERTS,
            top_k: 4,
            vocab_size: tokenizer.vocab_size(),
            num_hidden_layers: LAYERS,
            layer_ids: (0..LAYERS).collect(),
        };
        Self { folder: tempfile::tempdir().unwrap(), tokenizer, model, ranks }
    }

    /// The rank `shift` steps after `rank`, cyclically.
    fn shifted(&self, rank: usize, shift: u16) -> usize {
        (rank + usize::from(shift)) % usize::from(self.ranks)
    }

    /// Tables in which the words of text `i` prefer rank `i + shift`, and all other tokens none.
    pub(crate) fn builder(&self, texts: &[&str], shift: u16) -> TablesBuilder {
        let ranks = usize::from(self.ranks);
        let mut t = vec![f16::from_f32(1.0 / ranks as f32); self.model.vocab_size as usize * ranks];
        for (text, rank) in texts.iter().zip(0..) {
            for id in self.tokenizer.encode(text).unwrap() {
                let row = &mut t[id as usize * ranks..][..ranks];
                row.fill(f16::from_f32(0.1));
                row[self.shifted(rank, shift)] = f16::from_f32(0.6);
            }
        }
        let provenance = Provenance { source: "test".to_owned(), created: "2026-01-01T00:00:00Z".to_owned() };
        let slots = self.slots();
        let builder = TablesBuilder::dp(self.model.clone(), provenance, slots.primary(), t, vec![0.0; ranks]);
        if slots.to_placement().is_some() { builder } else { builder.replicas(slots) }
    }

    /// Experts in order; the first ones are repeated in the slots left over if the ranks do not divide them.
    fn slots(&self) -> Replicas {
        let (experts, ranks) = (self.model.num_experts, self.ranks);
        let slots = experts.next_multiple_of(ranks);
        let mut layer: Vec<i32> = (0..slots).map(|slot| (slot % experts).into()).collect();
        layer.chunks_exact_mut((slots / ranks).into()).for_each(<[i32]>::sort_unstable);
        Replicas::new(&self.model, ranks, slots.into(), layer.repeat(LAYERS.into())).unwrap()
    }

    /// Writes such tables and returns their path.
    pub(crate) fn write(&self, name: &str, texts: &[&str], shift: u16) -> PathBuf {
        let path = self.folder.path().join(name);
        self.builder(texts, shift).write(&path).unwrap();
        path
    }

    pub(crate) fn placement_digest(&self) -> String {
        let slots = self.slots();
        slots.to_placement().as_ref().map_or_else(|| slots.digest(), Placement::digest)
    }

    /// The report of a semmoe engine that runs this model and placement.
    pub(crate) fn info(&self) -> Value {
        json!({
            "model_path": "/models/tiny", "dp_size": self.ranks, "ep_size": self.ranks,
            "placement_digest": self.placement_digest(), "tokenizer_sha256": self.model.tokenizer_sha256,
            "num_experts": self.model.num_experts, "top_k": 4, "vocab_size": self.model.vocab_size,
            "num_hidden_layers": LAYERS, "layer_ids": self.model.layer_ids,
        })
    }

    /// One model with affinity over one backend, with so much room for load that only the tables decide.
    pub(crate) fn affinity(&self, url: &str, tables: &Path) -> String {
        format!(
            "[routing.settings]\nload_margin = 10.0\nprice_step = 0.0\nsequence_price_step = 0.0\nsequence_weight = 0.0\n{}",
            self.balanced(url, tables)
        )
    }

    /// One model with affinity over one backend, with the default settings.
    pub(crate) fn balanced(&self, url: &str, tables: &Path) -> String {
        format!(
            "[[models]]\nname = \"tiny\"\ntokenizer = \"{MODEL_DIR}/tokenizer.json\"\n\
             [[models.backends]]\nname = \"pod-a\"\nengine = \"semmoe\"\nurl = \"{url}\"\ntables = \"{}\"\n",
            tables.display()
        )
    }
}
