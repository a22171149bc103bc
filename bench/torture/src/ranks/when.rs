//! Moments of a job.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// At which moment of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum When {
    /// The ranks have met; the others connect the transport, and the victim has not begun to.
    Connect,
    /// All are connected, and none has called an operation.
    Before,
    /// Operations, short and long ones, follow each other.
    During,
    /// The victim has done its part of the last operation; the others finish.
    Last,
}

impl When {
    pub(crate) const ALL: [When; 4] = [When::Connect, When::Before, When::During, When::Last];

    pub(crate) fn name(self) -> &'static str {
        match self {
            When::Connect => "connect",
            When::Before => "before",
            When::During => "during",
            When::Last => "last",
        }
    }
}

impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for When {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        When::ALL.into_iter().find(|when| when.name() == name).ok_or_else(|| {
            let names = When::ALL.map(When::name).join(", ");
            format!("`{name}` is no moment; choose one of {names}")
        })
    }
}
