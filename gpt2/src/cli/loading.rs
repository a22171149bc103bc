//! What the user sees while a large text is encoded.

use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

use super::progress::terminal;
use super::{complain, say};
use crate::corpus::{LoadStatus, Stage};

/// A progress bar on a terminal, else a line now and then; nothing for what is done at once.
pub(super) struct LoadProgress {
    /// Whether this process is the one that speaks for all.
    speaks: bool,
    current: Option<Current>,
    /// Whether ids have been kept, or why they have not; `None` where none were to be.
    kept: Option<Result<(), ErrorKind>>,
}

struct Current {
    stage: Stage,
    since: Instant,
    total: u64,
    bar: Option<ProgressBar>,
    /// Time of the last line, where there is no bar.
    said: Instant,
}

/// Time between lines.
const EVERY: Duration = Duration::from_secs(10);

impl LoadProgress {
    pub(super) fn new(speaks: bool) -> Self {
        LoadProgress { speaks, current: None, kept: None }
    }

    pub(super) fn watch(&mut self, loading: LoadStatus) {
        let LoadStatus { stage, done, total } = loading;
        let (what, least) = match stage {
            Stage::Encoding => ("encoding", 2 << 20),
            // These are a hundred times as fast.
            Stage::Reading => ("reading", 256 << 20),
            Stage::Checking => ("checking", 256 << 20),
            Stage::Waiting => ("waiting for another process that encodes the text", 0),
            Stage::Kept => {
                self.kept = Some(Ok(()));
                return;
            }
            Stage::NotKept(why) => {
                self.kept = Some(Err(why));
                return;
            }
            Stage::Restored => {
                complain("warning: a killed run had moved the old shards out of their folder; they were moved back");
                return;
            }
        };
        if !self.speaks || total < least {
            return;
        }
        if self.current.as_ref().is_none_or(|current| current.stage != stage) {
            self.end();
            self.current = Some(Current::begin(stage, what, total));
        }
        let Some(current) = &mut self.current else { return };
        if let Some(bar) = &current.bar {
            bar.set_position(done);
        } else if current.said.elapsed() >= EVERY {
            current.said = Instant::now();
            let seconds = current.since.elapsed().as_secs();
            say(format_args!("{what}: {} of {} after {seconds} s", size(done), size(total)));
        }
    }

    /// Takes the bar away and says what was done. `folder` is the place of what is kept; with `warns` it says why that could not be done.
    pub(super) fn finish(mut self, folder: Option<&Path>, warns: bool) {
        let shown = self.current.is_some();
        self.end();
        let Some(folder) = folder else { return };
        match self.kept {
            Some(Ok(())) if shown => say(format_args!("the next run reads the token ids from {}", folder.display())),
            Some(Err(why)) if warns => complain(format_args!(
                "warning: the token ids could not be kept in {}: {why}; the next run has to encode or check the text again. Free some \
                 space there, name another folder (XDG_CACHE_HOME), or turn the cache off (--no-token-cache)",
                folder.display()
            )),
            _ => {}
        }
    }

    fn end(&mut self) {
        let Some(current) = self.current.take() else { return };
        if let Some(bar) = &current.bar {
            bar.finish_and_clear();
        }
        let seconds = current.since.elapsed().as_secs_f64();
        match current.stage {
            Stage::Encoding => say(format_args!("encoded {} of text in {seconds:.1} s", size(current.total))),
            Stage::Checking => say(format_args!("checked {} of token ids in {seconds:.1} s", size(current.total))),
            Stage::Reading | Stage::Waiting | Stage::Kept | Stage::NotKept(_) | Stage::Restored => {}
        }
    }
}

impl Current {
    fn begin(stage: Stage, what: &'static str, total: u64) -> Self {
        let bar = terminal().map(|terminal| {
            let bar = ProgressBar::with_draw_target(Some(total), terminal).with_message(what);
            if let Ok(style) =
                ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes}, {elapsed} of {duration}")
            {
                bar.set_style(style);
            }
            bar
        });
        if bar.is_none() && stage == Stage::Encoding {
            say(format_args!("{what} {} of text", size(total)));
        }
        let now = Instant::now();
        Current { stage, since: now, total, bar, said: now }
    }
}

fn size(bytes: u64) -> impl std::fmt::Display {
    HumanBytes(bytes)
}
