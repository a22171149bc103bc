//! Random tokens as a text, which no model can learn and every program can read.

use std::fs;
use std::path::Path;

use comm_core::splitmix::SplitMix64;
use gpt2::tokenizer::{GPT2_VOCABULARY, TokenizerKind};
use rig::record::Cell;
use rig::training::{TextSource, model};

/// Name of the file in a folder of results.
pub(super) const FILE: &str = "tokens.bin";

/// Writes tokens of the whole vocabulary, enough that nobody sees a sequence twice in a few dozen steps of `cell`: ids of 16 bits,
/// little-endian.
pub(super) fn write(path: &Path, cell: &Cell) -> Result<TextSource, String> {
    const LEAST: usize = 1 << 18;
    const MOST: usize = 1 << 24;
    const LARGEST: usize = 1 << 28;
    let sequence = model(cell, GPT2_VOCABULARY)?.block_size + 1;
    // A tenth is kept for validation.
    let wanted = sequence.saturating_mul(cell.batch).saturating_mul(cell.steps as usize).saturating_mul(5) / 4;
    let least = sequence.saturating_mul(cell.batch).saturating_mul(2);
    let count = wanted.clamp(LEAST, MOST).max(least);
    if count > LARGEST {
        return Err(format!(
            "two steps of {} sequences of {} tokens need a text of {count} tokens, and at most {LARGEST} are possible; give fewer or \
             shorter sequences",
            cell.batch,
            sequence - 1
        ));
    }
    let mut draw = SplitMix64::stream(cell.seed, &[2]);
    let mut bytes = Vec::with_capacity(2 * count);
    for _ in 0..count {
        let id = draw.next_u64() % GPT2_VOCABULARY as u64;
        bytes.extend_from_slice(&(id as u16).to_le_bytes());
    }
    fs::write(path, bytes).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(TextSource {
        source: Some(path.to_owned()),
        tokenizer: TokenizerKind::Gpt2,
        vocabulary: GPT2_VOCABULARY,
        description: format!("{count} random tokens of {GPT2_VOCABULARY}, seed {}", cell.seed),
    })
}

#[cfg(test)]
mod tests {
    use rig::record::Shape;

    use super::*;

    #[test]
    fn a_text_that_no_machine_holds_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let model = Shape { layers: Some(1), block: Some(1 << 20), ..Shape::default() };
        let cell = Cell { batch: 1 << 20, model, ..Cell::default() };
        let why = write(&folder.path().join(FILE), &cell).err().unwrap();
        assert!(why.contains("two steps of 1048576 sequences of 1048576 tokens"), "{why}");
        let few = Cell { batch: 2, ..Cell::default() };
        let text = write(&folder.path().join(FILE), &few).unwrap();
        assert_eq!(fs::metadata(text.source.unwrap()).unwrap().len(), 2 << 18);
    }
}
