//! What the user sees of a run: step lines, a progress bar on a terminal, a file of steps.

use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::path::Path;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

use crate::trainer::{Observer, StepReport};

/// Prints steps, and writes each to a file of JSON lines.
pub(super) struct Progress {
    bar: ProgressBar,
    steps: u64,
    log_every: u64,
    file: Option<BufWriter<File>>,
}

impl Progress {
    pub(super) fn new(log_every: u64, file: Option<&Path>) -> std::io::Result<Self> {
        let file = file.map(File::create).transpose()?.map(BufWriter::new);
        Ok(Progress { bar: ProgressBar::hidden(), steps: 0, log_every: log_every.max(1), file })
    }

    fn line(&self, text: &str) {
        if self.bar.is_hidden() {
            println!("{text}");
        } else {
            self.bar.suspend(|| println!("{text}"));
        }
    }

    fn record(&mut self, value: &impl serde::Serialize) {
        // A full disk must not end a run of hours; the step lines are on the screen as well.
        if let Some(file) = &mut self.file
            && serde_json::to_writer(&mut *file, value).is_ok()
        {
            let _ = file.write_all(b"\n").and_then(|()| file.flush());
        }
    }
}

impl Observer for Progress {
    fn started(&mut self, steps: u64) {
        self.steps = steps;
        if std::io::stdout().is_terminal() {
            // Standard output, because a launched rank's standard error belongs to the launcher.
            self.bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stdout());
            if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos}/{len} steps, {elapsed} of {duration}") {
                self.bar.set_style(style);
            }
        }
    }

    fn step(&mut self, report: &StepReport) {
        self.bar.set_position(report.step);
        self.record(report);
        if report.step == 1 || report.step == self.steps || report.step.is_multiple_of(self.log_every) {
            self.line(&format!(
                "step {:>5}/{} | loss {:.4} | norm {:.3} | lr {:.2e} | {:.1} ms | {:.0} tok/s | mfu {:.1}%",
                report.step,
                self.steps,
                report.loss,
                report.grad_norm,
                report.learning_rate,
                report.ms,
                report.tokens_per_s,
                100.0 * report.mfu
            ));
        }
        if report.step == self.steps {
            self.bar.finish_and_clear();
        }
    }

    fn validation(&mut self, step: u64, loss: f64) {
        self.line(&format!("step {step:>5}/{} | validation loss {loss:.4}", self.steps));
        self.record(&json!({"step": step, "validation_loss": loss}));
    }
}
