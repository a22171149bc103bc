//! Cutting a text into chunks that are encoded by themselves, and into its two parts.

use super::documents::Fault;
use super::pipeline::{Item, Pipeline};
use super::{LONGEST, Part, Piece, PrepareError, characters};
use crate::corpus::encode::cut_after;
use crate::tokenizer::END_OF_TEXT;

/// Collects text until it is a chunk's worth, and cuts where no id depends on it.
pub(super) struct Assembler<'a> {
    chunk: usize,
    /// The character at which the held-out part begins.
    held_from: Option<u64>,
    /// Characters so far.
    position: u64,
    part: Part,
    /// Text behind the last cut.
    text: String,
    /// Bytes of it in which there is no place for a cut.
    searched: usize,
    items: Vec<Item>,
    /// Bytes of the items.
    size: usize,
    pipeline: Pipeline<'a>,
}

impl<'a> Assembler<'a> {
    pub(super) fn new(chunk: usize, held_from: Option<u64>, pipeline: Pipeline<'a>) -> Self {
        Assembler {
            chunk,
            held_from,
            position: 0,
            part: Part::Train,
            text: String::new(),
            searched: 0,
            items: Vec::new(),
            size: 0,
            pipeline,
        }
    }

    pub(super) fn piece(&mut self, piece: Piece<'_>) -> Result<(), Fault> {
        match piece {
            Piece::Text(text) => {
                let (before, behind) = text.split_at(self.held_out_in(text));
                self.position += characters(before);
                self.take(before)?;
                if self.is_at_held_out() {
                    self.begin_held_out()?;
                }
                self.position += characters(behind);
                self.take(behind)
            }
            Piece::Mark => {
                if self.is_at_held_out() {
                    self.begin_held_out()?;
                }
                self.position += END_OF_TEXT.len() as u64;
                self.end_text();
                self.items.push(Item::Mark);
                self.size += END_OF_TEXT.len();
                // Inside the mark: the part begins behind it.
                if self.part == Part::Train && self.held_from.is_some_and(|from| from < self.position) {
                    self.begin_held_out()?;
                }
                if self.size >= self.chunk { self.flush() } else { Ok(()) }
            }
        }
    }

    /// Encodes the rest, and returns the number of characters.
    pub(super) fn finish(mut self) -> Result<u64, PrepareError> {
        self.end_text();
        if !self.items.is_empty() {
            self.pipeline.encode(self.part, std::mem::take(&mut self.items), self.size)?;
        }
        self.pipeline.finish()?;
        Ok(self.position)
    }

    /// The byte of the next `text` at which the held-out part begins; its length where that begins elsewhere.
    fn held_out_in(&self, text: &str) -> usize {
        let from = self.held_from.filter(|_| self.part == Part::Train);
        let Some(ahead) = from.and_then(|from| from.checked_sub(self.position)) else { return text.len() };
        // No longer than that in characters.
        if ahead >= text.len() as u64 {
            return text.len();
        }
        text.char_indices().nth(ahead as usize).map_or(text.len(), |(at, _)| at)
    }

    fn is_at_held_out(&self) -> bool {
        self.part == Part::Train && self.held_from == Some(self.position)
    }

    fn begin_held_out(&mut self) -> Result<(), Fault> {
        self.end_text();
        self.flush()?;
        self.part = Part::Validation;
        Ok(())
    }

    /// Takes text, of which whole chunks are encoded.
    fn take(&mut self, text: &str) -> Result<(), Fault> {
        self.text.push_str(text);
        let mut from = 0;
        loop {
            let wanted = self.chunk.saturating_sub(self.size).max(1);
            let rest = &self.text[from..];
            if rest.len() < wanted {
                break;
            }
            let at = cut_after(rest, self.searched.max(wanted));
            if at == rest.len() {
                self.searched = at;
                break;
            }
            self.items.push(Item::Text(rest[..at].to_owned()));
            self.size += at;
            from += at;
            self.searched = 0;
            self.flush()?;
        }
        self.text.drain(..from);
        if self.text.len() > LONGEST { Err(Fault::Uncut) } else { Ok(()) }
    }

    /// The text is over, or goes on in another part: a place for a cut like any.
    fn end_text(&mut self) {
        self.searched = 0;
        if !self.text.is_empty() {
            self.size += self.text.len();
            self.items.push(Item::Text(std::mem::take(&mut self.text)));
        }
    }

    fn flush(&mut self) -> Result<(), Fault> {
        let (items, size) = (std::mem::take(&mut self.items), std::mem::take(&mut self.size));
        if items.is_empty() {
            return Ok(());
        }
        Ok(self.pipeline.encode(self.part, items, size)?)
    }
}
