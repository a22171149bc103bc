//! Rows of the comparison, and the tables that they make.

use std::collections::BTreeMap;

use gpt2::trainer::Summary;
use rig::record::{Cell, Measured};
use rig::text::columns;
use serde::Serialize;

use super::fault::Fault;
use super::plan::{Column, FAULT_RANKS, Variant};

/// Strategy, ranks and the options.
const COLUMNS: usize = 2 + Column::ALL.len();

/// A run beside `single`'s.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Compared {
    kind: &'static str,
    strategy: String,
    ranks: usize,
    option: &'static str,
    /// Largest relative difference between a step's loss and `single`'s.
    loss_difference: Option<f64>,
    /// The same of the gradient norms before clipping.
    norm_difference: Option<f64>,
    bound: f64,
    pub(super) within: bool,
    weights_hash: Option<String>,
    /// `ok`, or why there are no figures.
    status: String,
    #[serde(skip)]
    column: Column,
}

impl Compared {
    pub(super) fn new(
        variant: Variant,
        ranks: usize,
        column: Column,
        (loss, norm): (f64, f64),
        outcome: &Result<&Measured, String>,
    ) -> Self {
        let trained = outcome.as_ref().ok().and_then(|measured| measured.trained.as_ref());
        let skipped = trained.map_or(0, |trained| trained.skipped_steps);
        let status = match outcome {
            Ok(_) if skipped > 0 => format!("{skipped} steps were skipped"),
            Ok(_) => "ok".into(),
            Err(error) => error.clone(),
        };
        Compared {
            kind: "parity",
            strategy: variant.name(),
            ranks,
            option: column.name(),
            loss_difference: Some(loss).filter(|loss| loss.is_finite()),
            norm_difference: Some(norm).filter(|norm| norm.is_finite()),
            bound: column.bound(),
            within: status == "ok" && loss.max(norm) <= column.bound(),
            weights_hash: outcome.as_ref().ok().map(|measured| measured.weights_hash.clone()),
            status,
            column,
        }
    }

    /// The larger difference.
    fn worst(&self) -> f64 {
        let (loss, norm) = self.loss_difference.zip(self.norm_difference).unwrap_or((f64::INFINITY, f64::INFINITY));
        loss.max(norm)
    }
}

/// A run with a planted fault beside `single`'s.
#[derive(Clone, Debug, Serialize)]
pub(super) struct FaultDetection {
    kind: &'static str,
    strategy: String,
    ranks: usize,
    fault: &'static str,
    loss_difference: Option<f64>,
    norm_difference: Option<f64>,
    bound: f64,
    /// Whether the comparison noticed, and nothing else did.
    pub(super) noticed: bool,
    status: String,
}

impl FaultDetection {
    pub(super) fn new(
        variant: Variant,
        fault: Fault,
        (loss, norm): (f64, f64),
        outcome: &Result<Summary, String>,
    ) -> Self {
        let bound = Column::F32.bound();
        FaultDetection {
            kind: "fault",
            strategy: variant.name(),
            ranks: FAULT_RANKS,
            fault: fault.name(),
            loss_difference: Some(loss).filter(|loss| loss.is_finite()),
            norm_difference: Some(norm).filter(|norm| norm.is_finite()),
            bound,
            noticed: outcome.is_ok() && loss.max(norm) > bound,
            status: outcome.as_ref().map_or_else(Clone::clone, |_| "ok".into()),
        }
    }
}

/// Strategy × ranks by option; `cell` has what all runs share.
pub(super) fn comparison(variants: &[Variant], cell: &Cell, rows: &[Compared]) -> String {
    let mut by_place: BTreeMap<(usize, usize), Vec<&Compared>> = BTreeMap::new();
    let order: Vec<String> = variants.iter().map(|variant| variant.name()).collect();
    for row in rows {
        let place = order.iter().position(|name| *name == row.strategy).unwrap_or(order.len());
        by_place.entry((place, row.ranks)).or_default().push(row);
    }
    let cells = |first: &str, second: &str, of: &dyn Fn(Column) -> String| -> [String; COLUMNS] {
        std::array::from_fn(|index| match index {
            0 => first.to_string(),
            1 => second.to_string(),
            option => of(Column::ALL[option - 2]),
        })
    };
    let header = cells("strategy", "ranks", &|column| column.name().to_string());
    let mut lines: Vec<[String; COLUMNS]> = Vec::new();
    for ((_, ranks), rows) in &by_place {
        lines.push(cells(&rows[0].strategy, &ranks.to_string(), &|column| {
            let row = rows.iter().find(|row| row.column == column);
            row.map_or("-".into(), |row| format!("{:.1e}{}", row.worst(), if row.within { "" } else { " !" }))
        }));
    }
    let over = |column: Column, of: &dyn Fn(&Compared) -> f64| {
        rows.iter().filter(|row| row.column == column).map(of).fold(0.0, f64::max)
    };
    let summary = |name: &str, of: &dyn Fn(Column) -> String| cells(name, "", of);
    lines.push(summary("largest", &|column| format!("{:.1e}", over(column, &Compared::worst))));
    lines.push(summary("of losses", &|column| {
        format!("{:.1e}", over(column, &|row| row.loss_difference.unwrap_or(f64::INFINITY)))
    }));
    lines.push(summary("of norms", &|column| {
        format!("{:.1e}", over(column, &|row| row.norm_difference.unwrap_or(f64::INFINITY)))
    }));
    lines.push(summary("bound", &|column| format!("{:.1e}", column.bound())));
    lines.push(summary("within", &|column| {
        let within = rows.iter().filter(|row| row.column == column).all(|row| row.within);
        if within { "yes".into() } else { "NO".into() }
    }));
    let largest =
        |f32: bool| rows.iter().filter(|row| row.column.is_f32() == f32).map(Compared::worst).fold(0.0, f64::max);
    let broken: Vec<String> = rows
        .iter()
        .filter(|row| row.status != "ok")
        .map(|row| format!("\n! {} on {} ranks, {}: {}", row.strategy, row.ranks, row.option, row.status))
        .collect();
    format!(
        "parity: the largest relative difference of a step's loss or gradient norm from single in f32 on the same global batch\n\
         ({}, {} sequences, {} steps, gradients clipped to {}, ranks are threads, one option at a time)\n\
         \n\
         {}\n\
         \n\
         largest difference in f32 {:.1e}, with a 16-bit type {:.1e}; {} of {} runs are within their bound{}",
        cell.preset,
        cell.batch,
        cell.steps,
        cell.clip.as_deref().unwrap_or("1"),
        columns(&header.each_ref().map(String::as_str), &lines, 1),
        largest(true),
        largest(false),
        rows.iter().filter(|row| row.within).count(),
        rows.len(),
        broken.concat()
    )
}

/// Strategy by fault.
pub(super) fn faults(rows: &[FaultDetection]) -> String {
    const HEADER: [&str; 6] = ["strategy", "fault", "loss", "gradient norm", "bound", "noticed"];
    let number = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.1e}"));
    let lines: Vec<[String; 6]> = rows
        .iter()
        .map(|row| {
            let noticed = if row.noticed { "yes".into() } else { format!("NO ({})", row.status) };
            let (loss, norm) = (number(row.loss_difference), number(row.norm_difference));
            [row.strategy.clone(), row.fault.into(), loss, norm, format!("{:.1e}", row.bound), noticed]
        })
        .collect();
    format!(
        "planted faults, f32 on {FAULT_RANKS} ranks, whose weights are the same at the end: {} of {} exceed the bound, as they should\n\
         (AdamW and clipping cancel a constant factor of the gradients, so a missing 1/N shows in the gradient norm, and hardly in the \
         loss)\n\
         \n\
         {}",
        rows.iter().filter(|row| row.noticed).count(),
        rows.len(),
        columns(&HEADER, &lines, 2)
    )
}
