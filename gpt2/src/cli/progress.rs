//! What the user sees of a run: step lines, a progress bar on a terminal, a file of steps, curves in TensorBoard.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use comm_core::printer;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};
use isocomm::Nodes;
use serde_json::json;

use super::folder::{EVENTS, Earlier, STEPS};
use super::metrics::Metrics;
use super::{complain, say, summary};
use crate::env::is_rank_of_open_mpi;
use crate::events::EventFile;
use crate::memory::{Bytes, Usage};
use crate::trainer::{Observer, SaveReport, StepReport, Summary};

/// Prints steps, and writes each to a file of JSON lines and to an event file.
pub(super) struct Progress {
    bar: ProgressBar,
    steps: u64,
    log_every: u64,
    /// Where files go, if anywhere, and what becomes of those of an earlier run there.
    folder: Option<(PathBuf, Earlier)>,
    file: Option<File>,
    events: Option<EventFile>,
    metrics: Option<Metrics>,
}

impl Progress {
    /// Files go to `folder`, if any, in the place of an earlier run's or behind what there is of it. Nothing in it is touched before the run has
    /// started. `metrics` hears everything too.
    pub(super) fn new(log_every: u64, folder: Option<(PathBuf, Earlier)>, metrics: Option<Metrics>) -> Self {
        let (bar, log_every) = (ProgressBar::hidden(), log_every.max(1));
        Progress { bar, steps: 0, log_every, folder, file: None, events: None, metrics }
    }

    /// Puts this run's files in the place of an earlier one's. As with a full disk later on, what cannot be written must not end the run.
    fn create_files(&mut self) {
        let Some((folder, earlier)) = self.folder.take() else { return };
        if let Err(error) = earlier.make_way(&folder) {
            self.warn(format_args!("a file of the earlier run could not be removed: {error}"));
        }
        let path = folder.join(STEPS);
        let goes_on = matches!(earlier, Earlier::GoesOn { .. });
        let mut how = OpenOptions::new();
        match how.create(true).write(true).append(goes_on).truncate(!goes_on).open(&path) {
            Ok(file) => self.file = Some(file),
            Err(error) => self.warn(format_args!("no steps.jsonl is written: {}: {error}", path.display())),
        }
        let path = folder.join(EVENTS);
        match EventFile::create(&path) {
            Ok(events) => self.events = Some(events),
            Err(error) => {
                self.warn(format_args!("no event file for TensorBoard is written: {}: {error}", path.display()))
            }
        }
    }

    fn line(&self, text: &str) {
        if self.bar.is_hidden() {
            say(text);
        } else {
            self.bar.suspend(|| say(text));
        }
    }

    fn warn(&self, text: impl fmt::Display) {
        self.bar.suspend(|| complain(format_args!("warning: {text}")));
    }

    fn record(&mut self, value: &impl serde::Serialize) {
        let (Some(file), Ok(mut line)) = (&mut self.file, serde_json::to_vec(value)) else { return };
        line.push(b'\n');
        // A full disk must not end a run of hours; the step lines are on the screen as well.
        if let Err(error) = file.write_all(&line) {
            self.warn(format_args!("no more steps are written to steps.jsonl: {error}"));
            self.file = None;
        }
    }

    fn chart(&mut self, step: u64, values: &[(&str, Option<f64>)]) {
        let Some(events) = &mut self.events else { return };
        let write = |(tag, value): &(&str, Option<f64>)| value.map_or(Ok(()), |value| events.scalar(tag, step, value));
        if let Err(error) = values.iter().try_for_each(write).and_then(|()| events.flush()) {
            self.warn(format_args!("no more steps are written to TensorBoard's event file: {error}"));
            self.events = None;
        }
    }
}

impl Observer for Progress {
    fn started(&mut self, steps: u64) {
        self.steps = steps;
        if let Some(metrics) = &self.metrics {
            metrics.started(steps);
        }
        self.create_files();
        // Standard output, because a launched rank's standard error belongs to the launcher.
        if let Some(terminal) = terminal() {
            self.bar = ProgressBar::with_draw_target(Some(steps), terminal);
            if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos}/{len} steps, {elapsed} of {duration}") {
                self.bar.set_style(style);
            }
        }
    }

    fn listening(&mut self, address: IpAddr, interface: &str) {
        self.line(&format!("network: rank 0 listens for data at {address} ({interface})"));
    }

    fn threads(&mut self, of_ranks: &[usize]) {
        let (least, most) = of_ranks.iter().fold((usize::MAX, 0), |(least, most), n| (least.min(*n), most.max(*n)));
        let threads = if least == most { most.to_string() } else { format!("{least} to {most}") };
        self.line(&format!("threads: {threads} in each rank, by the cores that it may use"));
    }

    fn nodes(&mut self, nodes: &Nodes) {
        self.line(&format!("nodes: {nodes}"));
    }

    fn step(&mut self, report: &StepReport) {
        // A terminal that is stopped gets the lines when it goes on, and not every state of the bar between them.
        if printer::stdout().pending() == 0 {
            self.bar.set_position(report.step);
        }
        self.record(report);
        if let Some(metrics) = &self.metrics {
            metrics.step(report);
        }
        let parts = &report.parts;
        let peak = |of: fn(&Usage) -> Bytes| report.memory.as_ref().map(|usage| of(usage).peak as f64);
        self.chart(
            report.step,
            &[
                ("loss/train", report.loss.is_finite().then_some(report.loss)),
                ("gradient/norm", report.grad_norm.is_finite().then_some(report.grad_norm)),
                ("gradient/loss_scale", Some(report.loss_scale)),
                ("gradient/skipped", Some(f64::from(u8::from(report.skipped)))),
                ("learning_rate", Some(report.learning_rate)),
                ("speed/tokens_per_s", Some(report.tokens_per_s)),
                ("speed/step_ms", Some(report.ms)),
                ("speed/mfu", report.mfu),
                ("speed/matrix_share", Some(report.matrix_share)),
                ("step_ms/compute", Some(parts.compute)),
                ("step_ms/exposed", Some(parts.exposed)),
                ("step_ms/scalars", Some(parts.scalars)),
                ("step_ms/hidden", Some(parts.hidden)),
                ("step_ms/optimizer", Some(parts.optimizer)),
                ("utilization/cpu", Some(report.cpu_utilization)),
                ("utilization/gpu_percent", report.gpu_utilization_percent),
                ("memory_peak/total", peak(|usage| usage.total)),
                ("memory_peak/parameters", peak(|usage| usage.parameters)),
                ("memory_peak/gradients", peak(|usage| usage.gradients)),
                ("memory_peak/optimizer", peak(|usage| usage.optimizer)),
                ("memory_peak/activations", peak(|usage| usage.activations)),
                ("memory_peak/communication", peak(|usage| usage.communication)),
                ("network/payload_bytes", report.bytes_sent.map(|bytes| bytes as f64)),
                ("network/messages", report.messages_sent.map(|messages| messages as f64)),
            ],
        );
        if report.step == 1 || report.step == self.steps || report.step.is_multiple_of(self.log_every) {
            self.line(&format!(
                "step {:>5}/{} | loss {:.4} | norm {:.3} | lr {:.2e} | {:.1} ms | {:.0} tok/s | mfu {}, {:.1}% of matrix peak | cpu {:.0}% | exposed {:.1}, \
                 scalars {:.1}, hidden {:.1} ms{}{}",
                report.step,
                self.steps,
                report.loss,
                report.grad_norm,
                report.learning_rate,
                report.ms,
                report.tokens_per_s,
                summary::percent(report.mfu),
                100.0 * report.matrix_share,
                100.0 * report.cpu_utilization,
                parts.exposed,
                parts.scalars,
                parts.hidden,
                report.peak_memory_bytes.map_or(String::new(), |bytes| format!(" | peak {:.1} MB", bytes as f64 / 1e6)),
                if report.skipped { " | overflow: step skipped" } else { "" }
            ));
        }
        if report.step == self.steps {
            self.bar.finish_and_clear();
        }
    }

    fn warning(&mut self, text: &str) {
        self.warn(text);
    }

    fn validation(&mut self, step: u64, loss: f64) {
        self.line(&format!("step {step:>5}/{} | validation loss {loss:.4}", self.steps));
        self.record(&json!({"step": step, "validation_loss": loss}));
        if let Some(metrics) = &self.metrics {
            metrics.validation(loss);
        }
        self.chart(step, &[("loss/validation", Some(loss))]);
    }

    fn saved(&mut self, report: &SaveReport) {
        let SaveReport { step, path, bytes, ms, extra_bytes, not_removed } = report;
        if let Some(metrics) = &self.metrics {
            metrics.saved(*step);
        }
        let extra = extra_bytes.map_or(String::new(), |bytes| format!(", {:.1} MB of memory", bytes as f64 / 1e6));
        self.line(&format!(
            "step {step:>5}/{} | checkpoint {} | {:.1} MB in {ms:.1} ms{extra}",
            self.steps,
            path.display(),
            *bytes as f64 / 1e6
        ));
        if let Some(why) = not_removed {
            self.warn(format_args!("an older checkpoint could not be removed: {why}"));
        }
    }

    fn ended(&mut self, summary: &Summary) {
        summary::print(summary);
    }
}

/// Standard output as something to draw a progress bar on, without ever waiting for it; `None` where it is no terminal that understands that.
pub(super) fn terminal() -> Option<ProgressDrawTarget> {
    if !io::stdout().is_terminal() || is_rank_of_open_mpi() || ProgressDrawTarget::stdout().is_hidden() {
        return None;
    }
    Some(ProgressDrawTarget::term_like_with_hz(Box::new(QueuedTerminal::default()), 20))
}

/// A terminal whose output goes through the queue of standard output, a picture at a time, in order with the lines.
#[derive(Debug, Default)]
struct QueuedTerminal {
    picture: Mutex<String>,
}

impl QueuedTerminal {
    fn add(&self, text: fmt::Arguments<'_>) -> io::Result<()> {
        let mut picture = self.picture.lock().unwrap_or_else(PoisonError::into_inner);
        fmt::Write::write_fmt(&mut *picture, text).map_err(io::Error::other)
    }

    /// Moves the cursor: not at all by 0, which terminals take for 1.
    fn step(&self, count: usize, direction: char) -> io::Result<()> {
        if count > 0 { self.add(format_args!("\x1b[{count}{direction}")) } else { Ok(()) }
    }
}

impl TermLike for QueuedTerminal {
    fn width(&self) -> u16 {
        crate::sys::terminal_width().unwrap_or(80)
    }

    fn move_cursor_up(&self, count: usize) -> io::Result<()> {
        self.step(count, 'A')
    }

    fn move_cursor_down(&self, count: usize) -> io::Result<()> {
        self.step(count, 'B')
    }

    fn move_cursor_right(&self, count: usize) -> io::Result<()> {
        self.step(count, 'C')
    }

    fn move_cursor_left(&self, count: usize) -> io::Result<()> {
        self.step(count, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.add(format_args!("{text}\n"))
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.add(format_args!("{text}"))
    }

    fn clear_line(&self) -> io::Result<()> {
        self.add(format_args!("\r\x1b[2K"))
    }

    fn flush(&self) -> io::Result<()> {
        let mut picture = self.picture.lock().unwrap_or_else(PoisonError::into_inner);
        printer::stdout().print(std::mem::take(&mut *picture));
        Ok(())
    }
}
