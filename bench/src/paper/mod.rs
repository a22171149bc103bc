//! `bench paper`: the comparisons of three published papers, run again under equal conditions.
//!
//! Two compare strategies of data-parallel training on GPT-2, the third what makes such training of BERT fast enough on an ordinary network. Here
//! all rows share one training loop, seed, order of the data, global batch, schedule and arithmetic, but for what a row is about; that they do is
//! asserted for each row, together with the number of operations and bytes that the
//! definition of the strategy asks for and one update a step. What the papers state stands in [`bai`], [`patwardhan`] and [`lin`], with where it
//! was read; what could not be read is called so.

mod bai;
mod lin;
mod options;
mod patwardhan;
mod row;
mod rows;
mod text;

use std::process::ExitCode;

use gpt2::cli::say;
use rig::BenchError;
use rig::debug;

pub(crate) use options::PaperArgs;

use options::Paper;
use row::Row;

/// Runs the comparison of one paper; fails when a row fails or an assertion does not hold.
pub(crate) fn run(args: &PaperArgs) -> Result<ExitCode, BenchError> {
    let (common, paper) = args.parts();
    debug::refuse_timings(common.allows_debug())?;
    let rows = match paper {
        Paper::Bai(args) => bai::run(args)?,
        Paper::Patwardhan(args) => patwardhan::run(args)?,
        Paper::Lin(args) => lin::run(args)?,
    };
    for row in &rows {
        for problem in &row.problems {
            say(format_args!("CHECK FAILED: {}: {problem}", row.name));
        }
        if row.summary.is_none() {
            say(format_args!("ROW FAILED: {}: {}", row.name, row.status));
        }
    }
    let sound = rows.iter().all(Row::is_sound);
    if sound {
        say(format_args!("\nAll {} rows ran, and all checks hold.", rows.len()));
    }
    Ok(if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
