//! What strategies keep from step to step beside masters and moments, in the files of a checkpoint.

use std::collections::HashMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::State;
use crate::segments::SegmentInfo;

/// What a strategy keeps of elements of a segment from step to step. Elements of which nothing is kept count as zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kept {
    /// The parameters as all ranks had them after their last synchronisation.
    Anchor,
    /// The momentum of the outer optimizer.
    Velocity,
    /// A mean of all ranks' that has come, and is to be applied in a later step.
    Arrived,
    /// What compression has left of a rank's own gradients.
    Left,
    /// What it has left of their mean, on the rank that forms it.
    LeftOfMean,
    /// The right factor of a matrix, column by column, from where the matrix begins.
    Factor,
}

impl Kept {
    /// Whether all ranks have the same values of it, of which each writes a part.
    pub fn is_shared(self) -> bool {
        !matches!(self, Kept::Left | Kept::LeftOfMean)
    }

    /// Whether it is kept of all elements of a segment, if of any.
    fn is_whole(self) -> bool {
        matches!(self, Kept::Anchor | Kept::Velocity | Kept::Arrived)
    }

    /// What it is called in the name of a tensor.
    pub(super) fn name(self) -> &'static str {
        match self {
            Kept::Anchor => "anchor",
            Kept::Velocity => "velocity",
            Kept::Arrived => "arrived",
            Kept::Left => "left",
            Kept::LeftOfMean => "left-of-mean",
            Kept::Factor => "factor",
        }
    }
}

/// A range of a segment of which a rank writes what is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeptPiece {
    /// What it is.
    pub what: Kept,
    /// The segment's name.
    pub segment: String,
    /// First element.
    pub start: usize,
    /// Number of elements, at least 1.
    pub len: usize,
}

/// What it is, the rank whose own it is, if it is one rank's, and the segment's number.
type Key = (Kept, Option<usize>, usize);

/// Ranges by their first element, and the file of each.
type Ranges = Vec<(Range<usize>, usize)>;

/// Where in the files it is.
#[derive(Clone, Debug)]
pub(super) struct KeptIndex(HashMap<Key, Ranges>);

impl KeptIndex {
    /// # Errors
    /// Which segment has not the elements that are said to be kept, or has them twice, or lacks some of what is kept of all or none; which file
    /// has what is a rank's own and does not say whose.
    pub(super) fn new(segments: &[SegmentInfo], state: &State) -> Result<Self, String> {
        let mut index: HashMap<Key, Ranges> = HashMap::new();
        for (number, file) in state.files.iter().enumerate() {
            for KeptPiece { what, segment, start, len } in &file.kept {
                let place = segments.iter().position(|info| info.name == *segment);
                let place = place.ok_or_else(|| format!("its model has no segment {segment:?}"))?;
                let whose = || file.rank.filter(|rank| *rank < state.ranks);
                let own = match what {
                    Kept::Left => {
                        Some(whose().ok_or_else(|| format!("{} does not say to which rank it belongs", file.name))?)
                    }
                    _ => None,
                };
                index.entry((*what, own, place)).or_default().push((*start..start.saturating_add(*len), number));
            }
        }
        for ((what, _, segment), ranges) in &mut index {
            ranges.sort_unstable_by_key(|(range, _)| range.start);
            let info = &segments[*segment];
            let is_whole = what.is_whole();
            let end = ranges.iter().try_fold(0, |end, (range, _)| {
                let follows = if is_whole { range.start == end } else { range.start >= end };
                (follows && !range.is_empty()).then_some(range.end)
            });
            if end.is_none_or(|end| end > info.len || (is_whole && end < info.len)) {
                let (what, often) = (what.name(), if is_whole { "once" } else { "at most once" });
                return Err(format!("its files do not have each {what} of segment {:?} {often}", info.name));
            }
        }
        let anchors = index.keys().filter(|(what, ..)| *what == Kept::Anchor).count();
        if anchors != 0 && anchors != segments.len() {
            return Err(format!("its files have the anchors of {anchors} of {} segments", segments.len()));
        }
        Ok(KeptIndex(index))
    }

    /// The ranges of each rank that has its own, in the order of ranks.
    pub(super) fn of_ranks(&self, what: Kept, segment: usize) -> impl Iterator<Item = &[(Range<usize>, usize)]> {
        let mut own: Vec<_> = self.0.iter().filter(|((kept, _, of), _)| (*kept, *of) == (what, segment)).collect();
        own.sort_unstable_by_key(|((_, rank, _), _)| *rank);
        own.into_iter().map(|(_, ranges)| ranges.as_slice())
    }

    /// The ranges of a segment of which `what` is kept, of the rank `own` where each rank has its own; none where there is nothing.
    pub(super) fn ranges(&self, what: Kept, own: Option<usize>, segment: usize) -> &[(Range<usize>, usize)] {
        self.0.get(&(what, own, segment)).map_or(&[], Vec::as_slice)
    }
}
