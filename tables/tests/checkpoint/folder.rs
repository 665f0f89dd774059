//! A checkpoint on disk and tables for it.

use std::path::PathBuf;

use semmoe_tables::permute::{PermuteError, PermuteReport, permute};
use semmoe_tables::{Placement, Tables, TablesBuilder};
use tempfile::TempDir;

use super::{Checkpoint, EXPERTS};
use crate::common;

/// Tables that place the experts of layers 1 and 2 in three groups, differently in each layer.
pub fn tables(stride: u16) -> Tables {
    let layer = |shift: u16| (0..EXPERTS).map(|e| (e * stride + shift) / stride % 3).collect::<Vec<u16>>();
    let mixed: Vec<u16> = (0..EXPERTS).map(|e| (e * 5 + stride) % 3).collect();
    placed(vec![mixed, layer(0)])
}

pub fn placed(layers: Vec<Vec<u16>>) -> Tables {
    let model = common::model(EXPERTS, 2, 5, &[1, 2]);
    let groups = 1 + layers.concat().into_iter().max().unwrap();
    let placement = Placement::new(groups, layers).unwrap();
    let t = vec![half::f16::ZERO; 5 * usize::from(groups)];
    TablesBuilder::dp(model, common::provenance(), placement, t, vec![0.0; usize::from(groups)]).finish().unwrap()
}

pub struct Folder {
    pub dir: TempDir,
}

impl Folder {
    pub fn of(checkpoint: &Checkpoint) -> Self {
        let folder = Self { dir: TempDir::new().unwrap() };
        checkpoint.write(&folder.source());
        folder
    }

    pub fn source(&self) -> PathBuf {
        self.dir.path().join("source")
    }

    pub fn out(&self) -> PathBuf {
        self.dir.path().join("made/out")
    }

    pub fn permute(&self, tables: &Tables) -> Result<PermuteReport, PermuteError> {
        let mut seen = (0, 0);
        let report = permute(tables, &self.source(), &self.out(), &mut |done, total| {
            assert!(done >= seen.0 && done <= total);
            seen = (done, total);
        })?;
        assert_eq!(seen, (2 * report.data_bytes, 2 * report.data_bytes), "every byte is written and checked");
        Ok(report)
    }
}
