//! The code blocks of a section of docs/operating.md, in order.

use std::cell::RefCell;
use std::collections::VecDeque;

use crate::support::repository;

#[derive(Debug)]
struct Block {
    /// Text of the nearest heading `### `; empty before the first.
    step: String,
    language: String,
    text: String,
}

/// The remaining blocks of a section.
pub(crate) struct Document {
    blocks: RefCell<VecDeque<Block>>,
}

impl Document {
    /// Reads the section under this second-level heading.
    pub(crate) fn read(section: &str) -> Self {
        let text = std::fs::read_to_string(repository("docs/operating.md")).expect("the document");
        let (_, rest) = text.split_once(&format!("\n## {section}\n")).expect("the section");
        let section = rest.split("\n## ").next().unwrap_or(rest);
        let (mut blocks, mut step, mut open) = (VecDeque::new(), String::new(), None);
        for line in section.lines() {
            match (&mut open, line.trim_start().strip_prefix("```")) {
                (None, Some(language)) => {
                    open = Some(Block { step: step.clone(), language: language.to_owned(), text: String::new() });
                }
                (Some(_), Some(_)) => blocks.extend(open.take()),
                (Some(block), None) => block.text = format!("{}{line}\n", block.text),
                (None, None) => {
                    if let Some(heading) = line.strip_prefix("### ") {
                        heading.clone_into(&mut step);
                    }
                }
            }
        }
        Self { blocks: RefCell::new(blocks) }
    }

    /// The next block, which must belong to this step and language, so that none is skipped.
    pub(crate) fn next(&self, step: &str, language: &str) -> String {
        let block = self.blocks.borrow_mut().pop_front().expect("a further block");
        let right = block.step.starts_with(step) && block.language == language;
        assert!(right, "expected a block of {language:?} in step {step:?}, found {block:?}");
        block.text
    }

    pub(crate) fn all_was_done(&self) {
        assert!(self.blocks.borrow().is_empty(), "not tried: {:?}", self.blocks.borrow());
    }
}
