//! Plans: files that say which cells a sweep consists of.
//!
//! A plan names values for axes; its cells are their product, less what `exclude` takes out. What means nothing to a cell (congestion
//! control in shared memory, a link for a single rank) is set to one value, and cells that are then the same are one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::Path;
use std::time::Duration;

use comm_core::job::MAX_WORLD_SIZE;
use gpt2::cli::MAX_THREADS;
use gpt2::config::Preset;
use gpt2::model::KernelChoice;
use gpt2::optim::{LearningRate, LossScaling, OptimizerKind};
use gpt2::precision::Precision;
use gpt2::strategy::{Compression, Setting, StrategyKind, StrategyOptions};
use isocomm::Rung;
use rig::folder::read_small;
use rig::link::{Carrier, LinkOptions, MAX_ENDS, Profile};
use rig::record::{Axis, Cell, DEFAULT, GLOO, InjectedDelay, LOOPBACK, NETWORK, NOBODY, Trainer, Validation};
use rig::training::{local_options, model, schedule};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use toml::Value;

use crate::pytorch::Torch;

/// A checked plan.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    pub(crate) name: String,
    /// What it is for, in a sentence.
    pub(crate) about: String,
    /// How often each cell runs.
    pub(crate) rounds: u32,
    /// The longest that one run may take.
    pub(crate) timeout: Duration,
    /// Whether ranks keep what every step did.
    pub(crate) watched: bool,
    /// Whether links are measured by one connection first.
    pub(crate) probe: bool,
    /// Whether the text is random tokens of GPT-2's vocabulary.
    pub(crate) tokens: bool,
    /// In the order of the plan.
    pub(crate) cells: Vec<Cell>,
}

/// The plans that come with this program.
pub(crate) const READY: [(&str, &str); 18] = [
    ("quick", include_str!("../plans/quick.toml")),
    ("links", include_str!("../plans/links.toml")),
    ("ladder", include_str!("../plans/ladder.toml")),
    ("scaling", include_str!("../plans/scaling.toml")),
    ("options", include_str!("../plans/options.toml")),
    ("control", include_str!("../plans/control.toml")),
    ("identity", include_str!("../plans/identity.toml")),
    ("learning", include_str!("../plans/learning.toml")),
    ("proof", include_str!("../plans/proof.toml")),
    ("parity", include_str!("../plans/parity.toml")),
    ("memory", include_str!("../plans/memory.toml")),
    ("overlap", include_str!("../plans/overlap.toml")),
    ("peers", include_str!("../plans/peers.toml")),
    ("compute", include_str!("../plans/compute.toml")),
    ("bai", include_str!("../plans/bai.toml")),
    ("patwardhan", include_str!("../plans/patwardhan.toml")),
    ("lin", include_str!("../plans/lin.toml")),
    ("bandwidth", include_str!("../plans/bandwidth.toml")),
];

/// What a ready plan gives an axis, for the default of an option: values separated by commas.
pub(crate) fn default(plan: &str, axis: Axis) -> &'static str {
    // A plan that cannot be read fails a test. What is kept of it is a few bytes for each option: ranks count their memory.
    Draft::ready(plan).map(|draft| draft.values(axis)).unwrap_or_default().join(",").leak()
}

/// Most cells of a plan. A product of many axes is quickly larger than anyone means.
const MAX_CELLS: usize = 100_000;

/// Most values of one axis.
const MAX_VALUES: usize = 1000;

/// A plan as its file has it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Draft {
    name: String,
    #[serde(default)]
    about: String,
    pub(crate) rounds: u32,
    #[serde(default = "two_minutes")]
    pub(crate) timeout_s: u64,
    /// Whether ranks keep what every step did. Those that do not have no parts of a step, but what the trainer itself says.
    #[serde(default = "on")]
    watch: bool,
    /// Whether links are measured by one connection first.
    #[serde(default)]
    probe: bool,
    /// Whether the text is random tokens of GPT-2's vocabulary.
    #[serde(default)]
    tokens: bool,
    /// Whether strategies run on one rank too, which then talks to nobody.
    #[serde(default)]
    one_rank: bool,
    axes: Table,
    /// More cells: each table takes the place of the same axes in `axes`.
    #[serde(default)]
    also: Vec<Table>,
    #[serde(default)]
    exclude: Vec<Exclusion>,
}

/// Values of axes, by axis.
type Table = BTreeMap<Axis, Values>;

/// The values of an axis: one, or a list.
#[derive(Clone, Debug, Serialize)]
struct Values(Vec<Value>);

impl<'de> Deserialize<'de> for Values {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match Value::deserialize(deserializer)? {
            Value::Array(values) => Values(values),
            one => Values(vec![one]),
        })
    }
}

/// The axes in the order in which a plan's cells vary, slowest first.
const ORDER: [Axis; Axis::ALL.len()] = [
    Axis::Preset,
    Axis::Layers,
    Axis::Heads,
    Axis::Width,
    Axis::Block,
    Axis::Link,
    Axis::Ends,
    Axis::Ranks,
    Axis::Transport,
    Axis::Strategy,
    Axis::Program,
    Axis::Alone,
    Axis::DedicatedServer,
    Axis::RanksPerNode,
    Axis::OneTransport,
    Axis::Compress,
    Axis::SyncEvery,
    Axis::Staleness,
    Axis::Precision,
    Axis::Wire,
    Axis::LossScaling,
    Axis::Bucket,
    Axis::FirstBucket,
    Axis::Fusion,
    Axis::Overlap,
    Axis::Lanes,
    Axis::Congestion,
    Axis::QuicMtu,
    Axis::Seed,
    Axis::Schedule,
    Axis::Clip,
    Axis::Optimizer,
    Axis::ShortSequences,
    Axis::Batch,
    Axis::Accumulation,
    Axis::Recompute,
    Axis::Kernels,
    Axis::Steps,
    Axis::ValidateEvery,
    Axis::ValidationBatches,
    Axis::Threads,
    Axis::Planted,
    Axis::Variant,
];

/// Bytes: a number, or one with a unit.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "Written")]
struct Size(usize);

#[derive(Deserialize)]
#[serde(untagged, expecting = "a number or a text")]
enum Written {
    Number(u64),
    Text(String),
}

impl TryFrom<Written> for Size {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        let bytes = match written {
            Written::Number(bytes) => Some(bytes),
            Written::Text(text) => {
                let units = [("KiB", 10), ("MiB", 20), ("GiB", 30)];
                let (digits, shift) = units
                    .iter()
                    .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)))
                    .unwrap_or((text.as_str(), 0));
                digits.trim().parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift))
            }
        };
        match bytes.and_then(|bytes| usize::try_from(bytes).ok()).filter(|bytes| *bytes > 0) {
            Some(bytes) => Ok(Size(bytes)),
            None => Err("a size is a number of bytes above 0, like 65536, \"64KiB\" or \"25MiB\"".into()),
        }
    }
}

/// QUIC's largest datagram: a number of bytes, or `default`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "Written")]
struct Mtu(Option<u16>);

impl TryFrom<Written> for Mtu {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        match written {
            Written::Text(text) if text == DEFAULT => Ok(Mtu(None)),
            Written::Number(bytes @ 1200..=65_507) => Ok(Mtu(u16::try_from(bytes).ok())),
            _ => Err("quic-mtu is a UDP payload of 1200 to 65507 bytes, or \"default\"".into()),
        }
    }
}

/// A delay to be planted, or `none`.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "WrittenDelay")]
struct Delay(Option<InjectedDelay>);

#[derive(Deserialize)]
#[serde(untagged, expecting = "\"none\" or { ms = 5, rank = 1 }")]
enum WrittenDelay {
    Text(String),
    Delay(DelayTable),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DelayTable {
    ms: f64,
    rank: Option<usize>,
}

impl TryFrom<WrittenDelay> for Delay {
    type Error = String;

    fn try_from(written: WrittenDelay) -> Result<Self, String> {
        match written {
            WrittenDelay::Text(text) if text == "none" => Ok(Delay(None)),
            WrittenDelay::Text(text) => {
                Err(format!("`{text}` is not a delay; write \"none\" or {{ ms = 5, rank = 1 }}"))
            }
            WrittenDelay::Delay(DelayTable { ms, rank }) if ms > 0.0 && ms <= 60_000.0 => {
                Ok(Delay(Some(InjectedDelay { microseconds: (ms * 1e3).round() as u64, rank })))
            }
            WrittenDelay::Delay(DelayTable { ms, .. }) => {
                Err(format!("a planted delay of {ms} ms must be above 0 and at most 60000"))
            }
        }
    }
}

/// What is left out: cells with these values, of all axes that are named.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
struct Exclusion(Table);

impl Exclusion {
    fn takes(&self, cell: &Cell) -> bool {
        self.0.iter().all(|(axis, values)| values.0.iter().any(|value| has(cell, *axis, value)))
    }
}

/// Whether the cell has this value of an axis, however it is written: `25MiB` is 26214400.
fn has(cell: &Cell, axis: Axis, value: &Value) -> bool {
    if written(value) == cell.value(axis) {
        return true;
    }
    // What cannot be put beside `validate-every` changes nothing.
    let mut other = cell.clone();
    axis != Axis::ValidationBatches
        && put(&mut other, axis, value.clone()).is_ok()
        && other.value(axis) == cell.value(axis)
}

/// A value as [`Cell::value`] writes it.
fn written(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Boolean(on) => if *on { "on" } else { "off" }.into(),
        other => other.to_string(),
    }
}

fn two_minutes() -> u64 {
    120
}

fn on() -> bool {
    true
}

impl Plan {
    /// The plan in a file, or a ready one by its name.
    ///
    /// # Errors
    /// What is wrong with it and where, for the user.
    pub(crate) fn load(path: &Path) -> Result<(Plan, String), String> {
        let ready = READY.iter().find(|(name, _)| path.as_os_str() == *name).map(|(_, text)| (*text).to_string());
        let text = match ready {
            Some(text) => text,
            None => read_small(path).map_err(|why| {
                let names = READY.map(|(name, _)| name).join(", ");
                format!("{why}; give the path of a plan, or the name of one that comes with this program: {names}")
            })?,
        };
        let plan = Plan::parse(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok((plan, text))
    }

    /// # Errors
    /// What is wrong with it and where, for the user.
    pub(crate) fn parse(text: &str) -> Result<Plan, String> {
        Draft::parse(text)?.plan()
    }

    /// The same plan where the ranks are on several machines: what would go over loopback goes over the network between them.
    pub(crate) fn over_network(&mut self) {
        let networked = |cell: &&mut Cell| {
            let talks = cell.transport.parse::<Rung>().is_ok_and(|rung| !rung.is_in_memory());
            cell.link == LOOPBACK && talks && !cell.alone
        };
        self.cells.iter_mut().filter(networked).for_each(|cell| cell.link = NETWORK.into());
    }
}

impl Draft {
    fn parse(text: &str) -> Result<Draft, String> {
        toml::from_str(text).map_err(|error| error.to_string().trim_end().to_string())
    }

    /// A ready plan, to be changed.
    ///
    /// # Errors
    /// There is none of this name.
    pub(crate) fn ready(name: &str) -> Result<Draft, String> {
        let (_, text) =
            READY.iter().find(|(known, _)| *known == name).ok_or_else(|| format!("there is no plan {name}"))?;
        Draft::parse(text)
    }

    /// Gives an axis these values instead of those of the plan, in `axes`.
    pub(crate) fn set<T: Display>(&mut self, axis: Axis, values: &[T]) -> &mut Self {
        set(&mut self.axes, axis, values);
        self
    }

    /// As [`set`](Draft::set), in the tables of `also` that name the axis.
    pub(crate) fn set_also<T: Display>(&mut self, axis: Axis, values: &[T]) -> &mut Self {
        let named = self.also.iter_mut().filter(|table| table.contains_key(&axis));
        named.for_each(|table| set(table, axis, values));
        self
    }

    /// As [`set_also`](Draft::set_also), in tables where `axis` has the one value `value`.
    pub(crate) fn set_also_where<T: Display>(
        &mut self,
        axis: Axis,
        value: &str,
        changed: Axis,
        values: &[T],
    ) -> &mut Self {
        let is = |table: &&mut Table| {
            table.get(&axis).is_some_and(|Values(values)| values.len() == 1 && written(&values[0]) == value)
        };
        self.also.iter_mut().filter(is).for_each(|table| set(table, changed, values));
        self
    }

    /// Adds cells: those of `axes` with these values in the place of its own.
    pub(crate) fn also(&mut self, values: &[(Axis, String)]) -> &mut Self {
        let mut table = Table::new();
        values.iter().for_each(|(axis, value)| set(&mut table, *axis, std::slice::from_ref(value)));
        self.also.push(table);
        self
    }

    /// Leaves the tables of `also` away.
    pub(crate) fn without_also(&mut self) -> &mut Self {
        self.also.clear();
        self
    }

    /// The value of an axis in the last table of `also`.
    pub(crate) fn last_also(&self, axis: Axis) -> Option<String> {
        self.also.last()?.get(&axis)?.0.first().map(written)
    }

    /// Keeps of an axis' values, wherever it is named, those that `keeps` says yes to. Tables of `also` with none left go.
    pub(crate) fn retain(&mut self, axis: Axis, keeps: impl Fn(&str) -> bool) -> &mut Self {
        for table in self.also.iter_mut().chain([&mut self.axes]) {
            if let Some(Values(values)) = table.get_mut(&axis) {
                values.retain(|value| keeps(&written(value)));
            }
        }
        self.also.retain(|table| table.get(&axis).is_none_or(|Values(values)| !values.is_empty()));
        self
    }

    /// The values of an axis in `axes`, as written; none where the plan does not name it.
    pub(crate) fn values(&self, axis: Axis) -> Vec<String> {
        self.axes.get(&axis).into_iter().flat_map(|Values(values)| values).map(written).collect()
    }

    /// The plan as a file has it.
    ///
    /// # Errors
    /// It cannot be written, for the user.
    pub(crate) fn text(&self) -> Result<String, String> {
        toml::to_string(self).map_err(|error| format!("the plan {}: {error}", self.name))
    }

    /// # Errors
    /// What is wrong with it and where, for the user.
    pub(crate) fn plan(&self) -> Result<Plan, String> {
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if !self.name.chars().all(is_name) || self.name.starts_with('.') || self.about.chars().any(char::is_control) {
            return Err(
                "name: a plan's name can have letters, digits, `-`, `_` and `.`; `about` must be one line".into()
            );
        }
        if self.name.is_empty() || self.rounds == 0 || self.timeout_s == 0 {
            return Err("a plan must have a name, at least 1 round, and a timeout-s of at least 1".into());
        }
        // An axis without a value leaves the cells to the other tables.
        let only_also = !self.also.is_empty() && self.axes.values().any(|Values(values)| values.is_empty());
        let mut all = if only_also { Vec::new() } else { self.cells(&self.axes)? };
        for more in &self.also {
            let mut table = self.axes.clone();
            table.extend(more.iter().map(|(axis, values)| (*axis, values.clone())));
            all.extend(self.cells(&table)?);
            if all.len() > MAX_CELLS {
                return Err(format!("the tables of `also` come to more than {MAX_CELLS} cells; split the plan"));
            }
        }
        if let Some(Exclusion(table)) =
            self.exclude.iter().find(|exclusion| !all.iter().any(|cell| exclusion.takes(cell)))
        {
            let one = |(axis, Values(values)): (&Axis, &Values)| {
                format!("{axis} {}", values.iter().map(written).collect::<Vec<_>>().join(" or "))
            };
            let what = table.iter().map(one).collect::<Vec<_>>().join(", ");
            return Err(format!("exclude: no cell has {what}; correct this entry or remove it"));
        }
        let mut wanted = all;
        wanted.retain(|cell| !self.exclude.iter().any(|exclusion| exclusion.takes(cell)));
        // The same cell may come from several values that mean nothing to it.
        let mut seen = BTreeSet::new();
        let cells: Vec<Cell> = wanted.into_iter().filter(|cell| seen.insert(cell.clone())).collect();
        if cells.is_empty() {
            return Err("the plan has no cells: `exclude` removes all of them".into());
        }
        Ok(Plan {
            name: self.name.clone(),
            about: self.about.clone(),
            rounds: self.rounds,
            timeout: Duration::from_secs(self.timeout_s),
            watched: self.watch,
            probe: self.probe,
            tokens: self.tokens,
            cells,
        })
    }

    /// The product of all axes.
    fn cells(&self, table: &Table) -> Result<Vec<Cell>, String> {
        let (batches, every) = (Axis::ValidationBatches, Axis::ValidateEvery);
        if table.contains_key(&batches) && !table.contains_key(&every) {
            return Err(format!("axis {batches}: without {every} there is no validation"));
        }
        let mut cells = vec![Cell::default()];
        for axis in ORDER {
            if let Some(values) = table.get(&axis) {
                cells = product(&cells, axis, values)?;
            }
        }
        cells.into_iter().map(|cell| checked(cell, self.one_rank)).collect()
    }
}

fn set<T: Display>(table: &mut Table, axis: Axis, values: &[T]) {
    // What is a number or a switch is written as one.
    let value = |value: &T| {
        let text = value.to_string();
        let number = text.parse::<i64>().ok().map(Value::Integer);
        let switch = || text.parse::<bool>().ok().map(Value::Boolean);
        number.or_else(switch).unwrap_or(Value::String(text))
    };
    table.insert(axis, Values(values.iter().map(value).collect()));
}

/// Each cell once with each value.
fn product(cells: &[Cell], axis: Axis, Values(values): &Values) -> Result<Vec<Cell>, String> {
    if values.is_empty() || values.len() > MAX_VALUES || cells.len() * values.len() > MAX_CELLS {
        return Err(format!(
            "axis {axis} has {} values: an axis can have 1 to {MAX_VALUES} values, and a plan at most {MAX_CELLS} cells; split the plan",
            values.len()
        ));
    }
    let each = cells.iter().flat_map(|cell| values.iter().map(move |value| (cell.clone(), value)));
    each.map(|(mut cell, value)| {
        put(&mut cell, axis, value.clone()).map_err(|error| format!("axis {axis}: {}", error.message().trim_end()))?;
        Ok(cell)
    })
    .collect()
}

/// Gives the cell this value of an axis.
fn put(cell: &mut Cell, axis: Axis, value: Value) -> Result<(), toml::de::Error> {
    match axis {
        Axis::Strategy => cell.strategy = value.try_into()?,
        Axis::Transport => cell.transport = value.try_into()?,
        Axis::Link => cell.link = value.try_into()?,
        Axis::Ranks => cell.ranks = value.try_into()?,
        Axis::Precision => cell.precision = value.try_into()?,
        Axis::Wire => cell.wire = value.try_into()?,
        Axis::Bucket => cell.bucket_bytes = value.try_into::<Size>()?.0,
        Axis::Overlap => cell.overlap = value.try_into()?,
        Axis::Lanes => cell.lanes = value.try_into()?,
        Axis::Congestion => cell.congestion = value.try_into()?,
        Axis::QuicMtu => cell.quic_mtu = value.try_into::<Mtu>()?.0,
        // Beyond what a file's numbers hold, as a text.
        Axis::Seed => cell.seed = written(&value).parse().map_err(toml::de::Error::custom)?,
        Axis::Preset => cell.preset = value.try_into()?,
        Axis::Batch => cell.batch = value.try_into()?,
        Axis::Accumulation => cell.accumulation = value.try_into()?,
        Axis::Recompute => cell.recompute = value.try_into()?,
        Axis::Kernels => cell.kernels = value.try_into()?,
        Axis::Steps => cell.steps = value.try_into()?,
        Axis::Threads => cell.threads = value.try_into()?,
        Axis::Planted => cell.planted = value.try_into::<Delay>()?.0,
        Axis::Variant => cell.variant = value.try_into()?,
        Axis::Program => cell.program = value.try_into()?,
        Axis::Alone => cell.alone = value.try_into()?,
        Axis::Layers => cell.model.layers = Some(value.try_into()?),
        Axis::Heads => cell.model.heads = Some(value.try_into()?),
        Axis::Width => cell.model.width = Some(value.try_into()?),
        Axis::Block => cell.model.block = Some(value.try_into()?),
        Axis::FirstBucket => cell.first_bucket_bytes = Some(value.try_into::<Size>()?.0),
        Axis::Fusion => cell.fusion_bytes = Some(value.try_into::<Size>()?.0),
        Axis::DedicatedServer => cell.dedicated_server = value.try_into()?,
        // Two nodes, where the ranks can be divided so.
        Axis::RanksPerNode if value.as_str() == Some("half") => {
            // The nodes of hsdp have several ranks.
            let least = if cell.strategy == StrategyKind::Hsdp.name() { 4 } else { 2 };
            let has_halves = cell.ranks >= least && cell.ranks.is_multiple_of(2);
            cell.ranks_per_node = Some(if has_halves { cell.ranks / 2 } else { cell.ranks });
        }
        Axis::RanksPerNode => cell.ranks_per_node = Some(value.try_into()?),
        Axis::OneTransport => cell.one_transport = value.try_into()?,
        Axis::Compress => cell.compress = Some(written(&value)).filter(|compression| compression != "none"),
        Axis::SyncEvery => cell.sync_every = Some(value.try_into()?),
        Axis::Staleness => cell.staleness = Some(value.try_into()?),
        Axis::Ends => cell.ends = Some(value.try_into()?),
        Axis::Schedule => cell.schedule = Some(value.try_into()?),
        // 1.0 and 1 are the same norm.
        Axis::Clip => {
            let text = written(&value);
            let norm = text.parse::<f64>();
            cell.clip = Some(norm.map_or(text, |norm| norm.to_string()));
        }
        Axis::ShortSequences => {
            let text = written(&value);
            let short = (text != "none").then(|| text.parse().map_err(toml::de::Error::custom));
            cell.short_sequences = short.transpose()?;
        }
        // The one that training takes by itself has one name.
        Axis::Optimizer => {
            cell.optimizer = Some(written(&value)).filter(|name| name != OptimizerKind::default().name())
        }
        Axis::LossScaling => cell.loss_scaling = Some(written(&value)).filter(|scaling| scaling != "off"),
        Axis::ValidateEvery => {
            let batches = cell.validation.map_or(1, |validation| validation.batches);
            let every: u64 = value.try_into()?;
            cell.validation = (every > 0).then_some(Validation { every, batches });
        }
        Axis::ValidationBatches => {
            let batches = value.try_into()?;
            cell.validation = cell.validation.map(|validation| Validation { batches, ..validation });
        }
    }
    Ok(())
}

/// The cell, if all its values mean something, with those that mean nothing to it set to what they are by default.
fn checked(mut cell: Cell, one_rank: bool) -> Result<Cell, String> {
    let of = |axis: Axis| move |why: String| format!("axis {axis}: {why}");
    let strategy = cell.strategy.parse::<StrategyKind>().map_err(String::from).map_err(of(Axis::Strategy))?;
    let single = strategy == StrategyKind::Single;
    cell.alone &= single && cell.ranks > 1;
    if single && !cell.alone {
        cell.ranks = 1;
    }
    let alone = single || cell.ranks == 1 && one_rank;
    if cell.program.is_pytorch() && !single && !Torch::has(strategy) {
        return Err(format!("axis program: PyTorch has ddp, zero1, zero2 and fsdp, not {strategy}"));
    }
    if cell.program == Trainer::PytorchCompiled && !single {
        return Err(format!(
            "axis program: pytorch-compiled trains on one device, by the strategy single, not {strategy}"
        ));
    }
    if alone {
        cell.transport = NOBODY.into();
    } else if cell.program.is_pytorch() {
        cell.transport = GLOO.into();
    } else {
        let rung: Rung = cell.transport.parse().map_err(of(Axis::Transport))?;
        cell.transport = rung.to_string();
    }
    let profile = Profile::find(&cell.link).map_err(of(Axis::Link))?;
    check_names(&cell)?;
    check_counts(&cell)?;
    if !alone && cell.ranks < 2 {
        return Err(format!(
            "axis ranks: {} needs at least 2 ranks; for one rank use the strategy `single`",
            cell.strategy
        ));
    }
    cell.dedicated_server &= strategy == StrategyKind::Ps && cell.ranks > 1;
    if !cell.batch.is_multiple_of(cell.workers() * cell.accumulation) {
        return Err(format!(
            "axis batch: {} sequences cannot be divided evenly among {} ranks and {} micro-steps",
            cell.batch,
            cell.workers(),
            cell.accumulation
        ));
    }
    if let Some(rank) = cell.planted.as_ref().and_then(|planted| planted.rank).filter(|rank| *rank >= cell.ranks) {
        return Err(format!("axis planted: there is no rank {rank} of {}", cell.ranks));
    }
    let rung = cell.transport.parse::<Rung>().ok();
    if alone && !cell.alone || rung.is_some_and(Rung::is_in_memory) {
        (cell.link, cell.congestion) = (LOOPBACK.into(), DEFAULT.into());
    }
    if cell.link == LOOPBACK {
        cell.ends = None;
    }
    check_ends(&cell, &profile)?;
    check_link(&cell)?;
    if !rung.is_some_and(Rung::has_packets) {
        cell.quic_mtu = None;
    }
    if single {
        let wire = cell.precision.clone();
        (cell.wire, cell.lanes) = (wire, 2);
    }
    cell.lanes = strategy.lanes(cell.ranks, cell.lanes);
    let spec = strategy.spec();
    if !spec.in_buckets {
        (cell.bucket_bytes, cell.first_bucket_bytes) = (StrategyOptions::default().bucket_bytes, None);
    }
    if strategy != StrategyKind::Ring {
        cell.fusion_bytes = None;
    }
    if !spec.tells_nodes_apart {
        (cell.ranks_per_node, cell.one_transport) = (None, false);
    }
    if strategy == StrategyKind::Hsdp && cell.ranks > 1 && cell.ranks_per_node() == 1 {
        return Err(format!("axis {}: hsdp needs nodes of at least 2 ranks, not of 1", Axis::RanksPerNode));
    }
    if !spec.overlaps {
        cell.overlap = true;
    }
    check_compression(&mut cell, strategy)?;
    check_scaling(&cell, strategy)?;
    let local = local_options(&cell);
    local.check(strategy).map_err(|why| format!("a setting of {strategy}: {why}"))?;
    cell.sync_every = cell.sync_every.filter(|_| strategy.has(Setting::SyncEvery));
    cell.staleness = cell.staleness.filter(|_| strategy.has(Setting::Staleness));
    if cell.program.is_pytorch() {
        // It has its own.
        cell.kernels = KernelChoice::default().name().into();
        check_pytorch(&cell)?;
    }
    Ok(cell)
}

/// Takes compression away where nothing is compressed, and checks it elsewhere: what is compressed has types of its own.
fn check_compression(cell: &mut Cell, strategy: StrategyKind) -> Result<(), String> {
    let compression = cell.compress.as_deref().map(str::parse::<Compression>).transpose();
    let compression = compression.map_err(|why| format!("axis {}: {why}", Axis::Compress))?;
    let suits = compression.is_some_and(|compression| compression.suits(strategy)) && cell.ranks > 1;
    cell.compress = cell.compress.take().filter(|_| suits);
    let Some(text) = &cell.compress else { return Ok(()) };
    if let Some(scaling) = &cell.loss_scaling {
        return Err(format!("axis {}: {text} cannot be combined with loss-scaling {scaling}", Axis::Compress));
    }
    cell.wire = Precision::F32.to_string();
    Ok(())
}

/// Whether its loss may be scaled as it says.
fn check_scaling(cell: &Cell, strategy: StrategyKind) -> Result<(), String> {
    let Some(scaling) = &cell.loss_scaling else { return Ok(()) };
    let checked = StrategyOptions::default().check_scaling(strategy, scaling.parse()?);
    checked.map_err(|why| format!("axis {}: {why}", Axis::LossScaling))
}

/// Whether its link has one congestion control.
fn check_link(cell: &Cell) -> Result<(), String> {
    let own = if LinkOptions::is_one(&cell.link) { cell.link.parse::<LinkOptions>()?.congestion } else { None };
    match own {
        Some(own) if cell.congestion != DEFAULT => Err(format!(
            "axis congestion: the link {} sets {own}, and the plan {}; remove one of them",
            cell.link, cell.congestion
        )),
        _ => Ok(()),
    }
}

/// Whether PyTorch's side does what the cell says: it trains in f32 by one schedule, without any of our trainer's options.
fn check_pytorch(cell: &Cell) -> Result<(), String> {
    let rate = LearningRate::Constant { rate: 3e-4 };
    let cannot = [
        (Axis::Precision, cell.precision != "f32"),
        (Axis::Wire, cell.wire != "f32"),
        (Axis::Compress, cell.compress.is_some()),
        (Axis::Accumulation, cell.accumulation != 1),
        (Axis::Recompute, cell.recompute),
        (Axis::Overlap, !cell.overlap),
        (Axis::Planted, cell.planted.is_some()),
        (Axis::LossScaling, cell.loss_scaling.is_some()),
        (Axis::ValidateEvery, cell.validation.is_some()),
        (Axis::Clip, cell.clip.as_deref() != Some("0")),
        (Axis::Optimizer, cell.optimizer.is_some()),
        (Axis::ShortSequences, cell.short_sequences.is_some()),
        (Axis::Schedule, cell.schedule.as_deref().map(schedule) != Some(Ok(rate))),
    ];
    match cannot.into_iter().find(|(_, cannot)| *cannot) {
        Some((axis, _)) => Err(format!(
            "axis {axis}: PyTorch trains in f32 with clip = 0, schedule = \"constant 3e-4\" and defaults, not with {}",
            cell.value(axis)
        )),
        None => Ok(()),
    }
}

/// Whether its names and texts mean something.
fn check_names(cell: &Cell) -> Result<(), String> {
    let of = |axis: Axis| move |why: String| format!("axis {axis}: {why}");
    cell.precision.parse::<Precision>().map_err(String::from).map_err(of(Axis::Precision))?;
    cell.wire.parse::<Precision>().map_err(String::from).map_err(of(Axis::Wire))?;
    cell.kernels.parse::<KernelChoice>().map_err(String::from).map_err(of(Axis::Kernels))?;
    let _: Preset = cell.preset.parse().map_err(|why| of(Axis::Preset)(format!("{why}")))?;
    // With any vocabulary.
    let model = model(cell, 256)?;
    if let Some(short) = cell.short_sequences {
        short.check(model.block_size).map_err(of(Axis::ShortSequences))?;
    }
    cell.schedule.as_deref().map(schedule).transpose().map_err(of(Axis::Schedule))?;
    if let Some(scaling) = &cell.loss_scaling {
        let _: LossScaling = scaling.parse().map_err(of(Axis::LossScaling))?;
    }
    if let Some(name) = &cell.optimizer {
        name.parse::<OptimizerKind>().map_err(String::from).map_err(of(Axis::Optimizer))?;
    }
    if let Some(clip) = &cell.clip
        && !clip.parse().is_ok_and(|norm: f64| norm.is_finite() && norm >= 0.0)
    {
        return Err(format!("axis clip: `{clip}` is not a norm; give a number, or 0 to turn clipping off"));
    }
    check_congestion(&cell.congestion)?;
    if cell.variant.chars().any(char::is_control) {
        return Err("axis variant: a variant is a name without control characters".into());
    }
    Ok(())
}

/// Whether its numbers lie within their bounds.
fn check_counts(cell: &Cell) -> Result<(), String> {
    let positive = [
        (Axis::Ranks, cell.ranks, MAX_WORLD_SIZE),
        (Axis::Lanes, cell.lanes, 64),
        (Axis::Batch, cell.batch, 1 << 20),
        (Axis::Accumulation, cell.accumulation, 1 << 20),
        (Axis::Steps, usize::try_from(cell.steps).unwrap_or(usize::MAX), 1_000_000),
        (Axis::Threads, cell.threads, MAX_THREADS),
    ];
    if let Some((axis, value, most)) = positive.into_iter().find(|(_, value, most)| *value == 0 || value > most) {
        return Err(format!("axis {axis}: {value} must be from 1 to {most}"));
    }
    if cell.validation.is_some_and(|validation| validation.batches == 0) {
        return Err(format!("axis {}: it must be at least 1, not 0", Axis::ValidationBatches));
    }
    Ok(())
}

/// Whether its ranks can be placed on the ends of its link.
fn check_ends(cell: &Cell, profile: &Profile) -> Result<(), String> {
    let ends = cell.ends();
    if ends == 0 || ends > cell.ranks || cell.ranks_per_node() == 0 {
        return Err(format!(
            "axis ends: {ends} ends cannot have {} ranks and nodes of {}",
            cell.ranks,
            cell.ranks_per_node()
        ));
    }
    if cell.link == LOOPBACK || profile.carrier == Carrier::None {
        return Ok(());
    }
    if ends < 2 {
        return Err(format!("axis ends: the link {} has at least 2 ends, not {ends}", cell.link));
    }
    if ends > MAX_ENDS {
        return Err(format!("axis ranks: the link {} has at most {MAX_ENDS} ends, not {ends}", cell.link));
    }
    let taken = cell.ranks.div_ceil(cell.ranks.div_ceil(ends));
    if taken < ends {
        return Err(format!("axis ends: {} ranks on {ends} ends leave {} without a rank", cell.ranks, ends - taken));
    }
    let (of_an_end, of_a_node) = (cell.ranks.div_ceil(ends), cell.ranks_per_node());
    let has_nodes = cell.strategy.parse::<StrategyKind>().is_ok_and(|kind| kind.spec().tells_nodes_apart);
    if has_nodes && !of_an_end.is_multiple_of(of_a_node) {
        return Err(format!(
            "axis {}: {} in nodes of {of_a_node} ranks, on {ends} ends of {of_an_end} ranks each, would have a node that spans two ends of a link",
            Axis::RanksPerNode,
            cell.strategy
        ));
    }
    if let Some(last) = profile.unusual.keys().max().filter(|last| **last >= ends) {
        return Err(format!(
            "axis ranks: the link {} describes the end of rank {last}, and there are {ends}",
            cell.link
        ));
    }
    Ok(())
}

/// Whether there is such a congestion control for TCP and QUIC alike.
fn check_congestion(name: &str) -> Result<(), String> {
    const KNOWN: [&str; 4] = [DEFAULT, "cubic", "bbr", "reno"];
    if KNOWN.contains(&name) {
        return Ok(());
    }
    Err(format!("axis congestion: TCP and QUIC do not both have `{name}`; choose one of {}", KNOWN.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(axes: &str) -> Result<Plan, String> {
        Plan::parse(&format!("name = \"x\"\nrounds = 3\n[axes]\n{axes}\n"))
    }

    #[test]
    fn cells_are_the_product_of_the_axes() {
        let plan = plan("strategy = [\"ddp\", \"fsdp\"]\ntransport = [\"tcp\", \"quic\"]\nranks = [2, 4]").unwrap();
        assert_eq!((plan.cells.len(), plan.rounds), (8, 3));
        let labels: Vec<String> = plan.cells.iter().map(|cell| cell.label(&Cell::varied(plan.cells.iter()))).collect();
        assert_eq!(labels[0], "ddp tcp ranks 2");
        assert!(labels.contains(&"fsdp quic ranks 4".to_string()));
    }

    #[test]
    fn what_means_nothing_to_a_cell_makes_no_cells() {
        let axes = "strategy = [\"single\", \"local-sgd\"]\ntransport = [\"shm\", \"tcp\", \"quic\"]\nlink = [\"loopback\", \"wan\"]\n\
                    congestion = [\"cubic\", \"bbr\"]\noverlap = [true, false]\nquic-mtu = [\"default\", 1452]";
        let cells = plan(axes).unwrap().cells;
        let count = |strategy: &str, transport: &str| {
            cells.iter().filter(|cell| cell.strategy == strategy && cell.transport == transport).count()
        };
        assert_eq!((count("single", NOBODY), count("local-sgd", "shm")), (1, 1));
        assert_eq!((count("local-sgd", "tcp"), count("local-sgd", "quic")), (4, 8));
    }

    #[test]
    fn what_is_compressed_is_so_where_the_strategy_can_and_in_types_of_its_own() {
        let axes = "strategy = [\"single\", \"ps\", \"ring\", \"ddp\", \"fsdp\"]\nwire = [\"f32\", \"bf16\"]\ncompress = [\"none\", \"topk:0.1\"]";
        let cells = plan(axes).unwrap().cells;
        let of = |strategy: &str| -> Vec<String> {
            let own = cells.iter().filter(|cell| cell.strategy == strategy);
            own.map(|cell| format!("{} {}", cell.value(Axis::Compress), cell.wire)).collect()
        };
        assert_eq!(of("single"), ["none f32"]);
        assert_eq!(of("fsdp"), ["none f32", "none bf16"]);
        for strategy in ["ps", "ring", "ddp"] {
            assert_eq!(of(strategy), ["none f32", "none bf16", "topk:0.1 f32"]);
        }
        // A server gets no factors.
        let cells = plan("strategy = [\"ps\", \"ddp\"]\ncompress = [\"sign\", \"powersgd:2\"]").unwrap().cells;
        let of = |strategy: &str| -> Vec<String> {
            let own = cells.iter().filter(|cell| cell.strategy == strategy);
            own.map(|cell| cell.value(Axis::Compress)).collect()
        };
        assert_eq!(
            (of("ps"), of("ddp")),
            (vec!["sign".into(), "none".into()], vec!["sign".into(), "powersgd:2".into()])
        );
    }

    #[test]
    fn a_cell_says_how_many_lanes_and_ranks_of_a_node_it_has() {
        let cells = plan("strategy = [\"ddp\", \"async-ps\"]\nranks = 4\nlanes = [2, 6]\nbatch = 12").unwrap().cells;
        assert_eq!(cells.iter().map(|cell| cell.lanes).collect::<Vec<_>>(), [2, 6, 4, 6]);
        for more in ["", "\nranks-per-node = \"half\""] {
            let axes = format!("strategy = [\"hierarchical\", \"hsdp\"]\nranks = [2, 3, 4]\nbatch = 12{more}");
            let found: Vec<usize> = plan(&axes).unwrap().cells.iter().map(Cell::ranks_per_node).collect();
            let of_three = if more.is_empty() { 1 } else { 3 };
            assert_eq!(found, [1, 2, of_three, 3, 2, 2], "{more}");
        }
    }

    #[test]
    fn one_device_beside_ranks_on_a_link_takes_none() {
        let axes = "strategy = [\"single\", \"ddp\"]\nlink = [\"slow-rank\", \"1gbit,mtu=1500\"]\nends = 2\nranks = 4";
        let cells = plan(axes).unwrap().cells;
        let found: Vec<(&str, &str, Option<usize>)> =
            cells.iter().map(|cell| (cell.strategy.as_str(), cell.link.as_str(), cell.ends)).collect();
        let expected = [("single", LOOPBACK, None), ("ddp", "slow-rank", Some(2)), ("ddp", "1gbit,mtu=1500", Some(2))];
        assert_eq!(found, expected);
    }

    #[test]
    fn exclusions_take_out_what_fits_them() {
        let axes = "strategy = [\"ddp\", \"ring\"]\nranks = [2, 4]\nbatch = 8\n[[exclude]]\nstrategy = \"ring\"\nranks = [4, 8]";
        let cells = plan(axes).unwrap().cells;
        assert_eq!(cells.len(), 3);
        assert!(!cells.iter().any(|cell| cell.strategy == "ring" && cell.ranks == 4));
    }

    #[test]
    fn exclusions_know_a_value_however_it_is_written() {
        let left = |axes: &str, exclude: &str| plan(&format!("{axes}\n[[exclude]]\n{exclude}")).unwrap().cells;
        let sizes = left("bucket = [\"25MiB\", 65536]", "bucket = \"64KiB\"");
        assert_eq!(sizes.iter().map(|cell| cell.bucket_bytes).collect::<Vec<_>>(), [25 << 20]);
        let validated = left("validate-every = [0, 5]", "validate-every = 0");
        assert_eq!(validated.iter().map(|cell| cell.validation.unwrap().every).collect::<Vec<_>>(), [5]);
        let axes = "validate-every = [0, 5]\nvalidation-batches = 3";
        assert_eq!(left(axes, "validation-batches = [3, 4]").len(), 1);
        let scaled = left("loss-scaling = [\"off\", 1024]", "loss-scaling = \"off\"");
        assert_eq!(scaled.iter().map(|cell| cell.loss_scaling.as_deref()).collect::<Vec<_>>(), [Some("1024")]);
    }

    #[test]
    fn a_norm_is_one_however_it_is_written() {
        let cells = plan("clip = [1, 1.0, \"1.00\", 0.0, 0.5]").unwrap().cells;
        let norms: Vec<Option<&str>> = cells.iter().map(|cell| cell.clip.as_deref()).collect();
        assert_eq!(norms, [Some("1"), Some("0"), Some("0.5")]);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        let cases = [
            ("strategy = \"telepathy\"", "telepathy"),
            ("transport = \"pigeon\"", "pigeon"),
            ("stratgy = \"ddp\"", "stratgy"),
            ("link = \"moon\"", "moon"),
            ("link = \"wan\"\nranks = 256\nbatch = 256", "at most 200 ends"),
            ("variant = \"a\\u0000\"", "axis variant"),
            ("ranks = 0", "axis ranks"),
            ("ranks = 1", "at least 2 ranks"),
            ("ranks = \"two\"", "two"),
            ("batch = 3", "axis batch"),
            ("bucket = \"big\"", "64KiB"),
            ("bucket = 0", "above 0"),
            ("quic-mtu = 3", "1200"),
            ("congestion = \"vegas\"", "vegas"),
            ("planted = { ms = -1 }", "planted delay"),
            ("planted = { ms = 5, rank = 7 }", "no rank 7"),
            ("steps = []", "axis steps"),
            ("wire = \"f64\"", "axis wire"),
            ("compress = \"topk\"", "axis compress"),
            ("optimizer = \"adam\"", "axis optimizer"),
            ("short-sequences = \"16\"", "TOKENSxSTEPS"),
            ("short-sequences = \"7x3\"", "axis short-sequences"),
            ("compress = \"int8\"\nloss-scaling = \"dynamic\"", "loss-scaling dynamic"),
            ("strategy = \"async-ps\"\nloss-scaling = \"dynamic\"", "--strategy async-ps"),
            ("strategy = \"hsdp\"\nranks-per-node = 1", "nodes of at least 2 ranks"),
            ("strategy = \"hsdp\"\nlink = \"wan\"", "spans two ends of a link"),
            ("strategy = \"hierarchical\"\nlink = \"wan\"\nranks = 4\nends = 4\nbatch = 4", "spans two ends of a link"),
            ("link = \"wan\"\nends = 0", "axis ends"),
            ("link = \"wan\"\nends = 1", "axis ends"),
            ("link = \"wan\"\nranks = 5\nends = 4\nbatch = 5", "leave 1 without a rank"),
            ("link = \"slow-rank\"\nranks = 4\nends = 1", "axis ends"),
            ("link = \"1gbit,mtu=1500,congestion=bbr\"\ncongestion = \"cubic\"", "sets bbr, and the plan cubic"),
            ("validation-batches = 4", "without validate-every"),
            ("validate-every = 5\nvalidation-batches = 0", "axis validation-batches"),
            ("program = \"pytorch\"\nclip = 0", "axis schedule"),
            ("strategy = \"ddp\"\nprogram = \"pytorch-compiled\"", "by the strategy single"),
            ("program = \"pytorch\"\nprecision = \"bf16\"", "axis precision"),
            ("strategy = \"ddp\"\n[[exclude]]\nstrategy = \"ddp\"", "the plan has no cells"),
            ("strategy = \"ddp\"\n[[exclude]]\nstrtegy = \"ddp\"", "strtegy"),
            ("ranks = [2, 4]\n[[exclude]]\nranks = 4\nstrategy = \"dpp\"", "no cell has strategy dpp, ranks 4"),
            ("validate-every = [0, 5]\n[[exclude]]\nvalidation-batches = 4", "no cell has validation-batches 4"),
        ];
        for (axes, expected) in cases {
            let why = plan(axes).unwrap_err();
            assert!(why.contains(expected), "{axes}: {why}");
        }
        assert!(Plan::parse("").unwrap_err().contains("name"));
        assert!(Plan::parse("name = \"../x\"\nrounds = 1\n[axes]").unwrap_err().contains("name"));
        assert!(Plan::load(Path::new("/nowhere.toml")).unwrap_err().contains("/nowhere.toml"));
    }

    #[test]
    fn ready_plans_are_right() {
        for (name, text) in READY {
            let plan = Plan::parse(text).unwrap_or_else(|why| panic!("{name}: {why}"));
            assert!(plan.name == name && !plan.about.is_empty() && !plan.cells.is_empty(), "{name}");
        }
    }

    #[test]
    fn the_sweep_of_bandwidth_has_every_strategy_over_every_link() {
        let plan = Plan::load(Path::new("bandwidth")).unwrap().0;
        let links: BTreeSet<&str> =
            plan.cells.iter().map(|cell| cell.link.as_str()).filter(|link| *link != LOOPBACK).collect();
        assert_eq!(links, BTreeSet::from(["lan-10g", "lan-10m", "lan-100m", "lan-1g", "wan", "wan-near"]));
        let has = |strategy: &str, compress: Option<&str>, transport: &str, link: &str| {
            plan.cells.iter().any(|cell| {
                (cell.strategy.as_str(), cell.transport.as_str(), cell.link.as_str()) == (strategy, transport, link)
                    && cell.compress.as_deref() == compress
            })
        };
        let networked = StrategyKind::ALL.into_iter().filter(|kind| *kind != StrategyKind::Single);
        let compressed = ["int8", "sign", "topk:0.01", "powersgd:2"].map(|how| ("ddp", Some(how)));
        let all = networked.map(|kind| (kind.name(), None)).chain(compressed).chain([("ps", Some("sign"))]);
        for (strategy, compress) in all {
            for transport in ["tcp", "quic"] {
                let missing = links.iter().find(|link| !has(strategy, compress, transport, link));
                assert_eq!(missing, None, "{strategy} {compress:?} over {transport}");
            }
        }
        // 19 ways to train over 2 transports and 6 links, 17 of them in long runs, and ranks that talk to nobody.
        assert_eq!(plan.cells.len(), 19 * 2 * 6 + 17 + 2);
        let alone = plan.cells.iter().filter(|cell| cell.alone);
        assert_eq!(alone.map(|cell| cell.ranks).collect::<Vec<_>>(), [2, 4]);
        // Long and short runs learn alike.
        assert!(plan.cells.iter().all(|cell| cell.schedule == plan.cells[0].schedule));
    }

    #[test]
    fn what_is_learnt_is_compared_with_three_seeds_of_each() {
        let plan = Plan::load(Path::new("learning")).unwrap().0;
        let of_seed = |seed: u64| -> Vec<Cell> {
            let cells = plan.cells.iter().filter(|cell| cell.seed == seed);
            cells.map(|cell| Cell { seed: 0, ..cell.clone() }).collect()
        };
        let first = of_seed(1);
        assert_eq!(plan.cells.len(), 3 * first.len());
        assert!(of_seed(2) == first && of_seed(3) == first);
        let ways = |strategy: &str| first.iter().filter(|cell| cell.strategy == strategy).count();
        // Seven gradients of ddp; a server gets no factors; three bounds of staleness.
        assert_eq!(["ddp", "ps", "async-ps", "diloco", "sparta"].map(ways), [7, 5, 3, 1, 1]);
        assert_eq!(first.len(), 7 + 5 + 3 + 4);
    }

    #[test]
    fn sizes_have_units() {
        let plan = plan("bucket = [65536, \"64KiB\", \"25MiB\"]").unwrap();
        let sizes: Vec<usize> = plan.cells.iter().map(|cell| cell.bucket_bytes).collect();
        assert_eq!(sizes, [65_536, 25 << 20]);
    }
}
