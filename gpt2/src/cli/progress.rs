//! What the user sees of a run: step lines, a progress bar on a terminal, a file of steps.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::Path;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

use super::say;
use crate::trainer::{Observer, StepReport};

/// Prints steps, and writes each to a file of JSON lines.
pub(super) struct Progress {
    bar: ProgressBar,
    steps: u64,
    log_every: u64,
    file: Option<File>,
}

impl Progress {
    pub(super) fn new(log_every: u64, file: Option<&Path>) -> std::io::Result<Self> {
        let file = file.map(File::create).transpose()?;
        Ok(Progress { bar: ProgressBar::hidden(), steps: 0, log_every: log_every.max(1), file })
    }

    fn line(&self, text: &str) {
        if self.bar.is_hidden() {
            say(text);
        } else {
            self.bar.suspend(|| say(text));
        }
    }

    fn record(&mut self, value: &impl serde::Serialize) {
        let (Some(file), Ok(mut line)) = (&mut self.file, serde_json::to_vec(value)) else { return };
        line.push(b'\n');
        // A full disk must not end a run of hours; the step lines are on the screen as well.
        if let Err(error) = file.write_all(&line) {
            eprintln!("warning: the file of steps ends here: {error}");
            self.file = None;
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

    fn warning(&mut self, text: &str) {
        self.bar.suspend(|| eprintln!("warning: {text}"));
    }

    fn validation(&mut self, step: u64, loss: f64) {
        self.line(&format!("step {step:>5}/{} | validation loss {loss:.4}", self.steps));
        self.record(&json!({"step": step, "validation_loss": loss}));
    }
}
