//! Reading a checkpoint: any range of any segment, from whichever files it is in.

use std::ops::Range;

use super::part::PartReader;
use super::{Kept, Kind, PartFile, Saved, SavedError, tensor};

/// Whose values are read, where the ranks of the run that was saved had values of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Those of this rank.
    Rank(usize),
    /// The mean of all ranks'.
    Mean,
}

/// Reads ranges of segments, from whichever files they are in. Files are opened when they are first needed.
#[derive(Debug)]
pub struct Reader<'a> {
    saved: &'a Saved,
    whose: Whose,
    open: Vec<Option<PartReader>>,
}

impl<'a> Reader<'a> {
    /// Of this checkpoint.
    pub fn new(saved: &'a Saved, whose: Whose) -> Self {
        Reader { saved, whose, open: saved.state.files.iter().map(|_| None).collect() }
    }

    /// Whose values it reads.
    pub fn whose(&self) -> Whose {
        self.whose
    }

    /// Steps that the optimizers of a segment have taken: of several ranks' the most.
    pub fn optimizer_steps(&self, segment: usize) -> u64 {
        let Saved { state, segments, .. } = self.saved;
        let is_meant = |file: &&PartFile| match self.whose {
            Whose::Rank(rank) if state.replicas => file.rank == Some(rank),
            _ => true,
        };
        let pieces = state.files.iter().filter(is_meant).flat_map(|file| &file.pieces);
        let of_segment = pieces.filter(|piece| piece.segment == segments[segment].name);
        of_segment.map(|piece| piece.optimizer_steps).max().unwrap_or(0)
    }

    /// The elements `range` of a segment; none of moments of an optimizer that has none.
    ///
    /// # Errors
    /// [`SavedError::Foreign`] where the segment has no such range, [`SavedError::Altered`] where a file does not hold what `run.json` says,
    /// [`SavedError::Io`].
    pub fn read(&mut self, segment: usize, kind: Kind, range: Range<usize>) -> Result<Vec<f32>, SavedError> {
        self.check(segment, &range)?;
        if !self.saved.kinds.contains(&kind) {
            return Ok(Vec::new());
        }
        let saved = self.saved;
        match self.whose {
            Whose::Rank(rank) if saved.state.replicas => {
                let index = saved.indices.get(rank);
                let index = index.ok_or_else(|| self.foreign(format!("it has no values of rank {rank}")))?;
                self.gather(segment, kind.name(), &index[segment], range)
            }
            _ => {
                let replicas = saved.indices.iter().map(|index| index[segment].as_slice());
                self.mean(segment, kind.name(), (replicas, saved.indices.len()), range)
            }
        }
    }

    /// What a strategy has kept of the elements `range` of a segment, with zeros for those of which nothing is kept; `None` where nothing is
    /// kept of the segment that this rank may go on with. A rank that goes on with the mean of all ranks' gets, of what compression has left,
    /// the mean over those whose gradients a step averaged, together with what is left of the mean, which nobody gets then, and no means that
    /// have not been applied: what they are of is in the mean of all parameters.
    ///
    /// # Errors
    /// Those of [`read`](Reader::read).
    pub fn kept(&mut self, segment: usize, what: Kept, range: Range<usize>) -> Result<Option<Vec<f32>>, SavedError> {
        self.check(segment, &range)?;
        let saved = self.saved;
        let kept = &saved.kept;
        match (what, self.whose) {
            (Kept::Arrived | Kept::LeftOfMean, Whose::Mean) => Ok(None),
            (Kept::Left, Whose::Mean) => {
                let of_mean = kept.ranges(Kept::LeftOfMean, None, segment);
                let of_ranks: Vec<_> = kept.of_ranks(what, segment).collect();
                if of_mean.is_empty() && of_ranks.is_empty() {
                    return Ok(None);
                }
                let of_ranks = (of_ranks.into_iter(), saved.state.averaged());
                let mut left = self.mean(segment, what.name(), of_ranks, range.clone())?;
                let more = self.gather(segment, Kept::LeftOfMean.name(), of_mean, range)?;
                left.iter_mut().zip(more).for_each(|(left, more)| *left += more);
                Ok(Some(left))
            }
            (_, whose) => {
                let own = match whose {
                    Whose::Rank(rank) if what == Kept::Left => Some(rank),
                    _ => None,
                };
                match kept.ranges(what, own, segment) {
                    [] => Ok(None),
                    ranges => self.gather(segment, what.name(), ranges, range).map(Some),
                }
            }
        }
    }

    /// The mean, element by element, over so many of what some of them have in these ranges.
    fn mean<'i>(
        &mut self,
        segment: usize,
        what: &str,
        (ranges, count): (impl Iterator<Item = &'i [(Range<usize>, usize)]>, usize),
        range: Range<usize>,
    ) -> Result<Vec<f32>, SavedError> {
        let mut sum: Option<Vec<f32>> = None;
        for ranges in ranges {
            let own = self.gather(segment, what, ranges, range.clone())?;
            match &mut sum {
                None => sum = Some(own),
                Some(sum) => sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own),
            }
        }
        let mut mean = sum.unwrap_or_else(|| vec![0.0; range.len()]);
        if count > 1 {
            mean.iter_mut().for_each(|sum| *sum /= count as f32);
        }
        Ok(mean)
    }

    /// The elements `range` of the segment from these ranges of it, with the file of each; zeros where there are none.
    fn gather(
        &mut self,
        segment: usize,
        what: &str,
        ranges: &[(Range<usize>, usize)],
        range: Range<usize>,
    ) -> Result<Vec<f32>, SavedError> {
        let saved = self.saved;
        let mut values = vec![0.0; range.len()];
        for (piece, file) in ranges {
            let (start, end) = (piece.start.max(range.start), piece.end.min(range.end));
            if start >= end {
                continue;
            }
            let entry = &saved.state.files[*file];
            let reader = match &mut self.open[*file] {
                Some(reader) => reader,
                none => {
                    let tensors = PartFile::tensors(&entry.pieces, &entry.kept, saved.kinds);
                    let opened = PartReader::open(&saved.folder.join(&entry.name), tensors);
                    none.insert(opened.map_err(|detail| saved.altered(entry, detail))?)
                }
            };
            let place = &mut values[start - range.start..end - range.start];
            let name = tensor(&saved.segments[segment].name, piece.start, what);
            let read = reader.read(&name, start - piece.start, place);
            read.map_err(|detail| saved.altered(entry, detail))?;
        }
        Ok(values)
    }

    fn check(&self, segment: usize, range: &Range<usize>) -> Result<(), SavedError> {
        match self.saved.segments.get(segment) {
            Some(info) if range.start <= range.end && range.end <= info.len => Ok(()),
            _ => Err(self.foreign(format!("it has no elements {range:?} of segment {segment}"))),
        }
    }

    fn foreign(&self, detail: String) -> SavedError {
        SavedError::Foreign { path: self.saved.folder.clone(), detail }
    }
}
