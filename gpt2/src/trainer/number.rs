//! Numbers in reports: JSON has no NaN, so what is not finite is `null` there, and comes back as NaN.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub(super) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    value.is_finite().then_some(*value).serialize(serializer)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// The same for lists of numbers that belong to steps.
pub(super) mod pairs {
    use super::{Deserialize, Deserializer, Serialize, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(values: &[(u64, f64)], serializer: S) -> Result<S::Ok, S::Error> {
        let values: Vec<(u64, Option<f64>)> =
            values.iter().map(|(step, value)| (*step, value.is_finite().then_some(*value))).collect();
        values.serialize(serializer)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<(u64, f64)>, D::Error> {
        let values: Vec<(u64, Option<f64>)> = Vec::deserialize(deserializer)?;
        Ok(values.into_iter().map(|(step, value)| (step, value.unwrap_or(f64::NAN))).collect())
    }
}

/// The same for lists.
pub(super) mod list {
    use super::{Deserialize, Deserializer, Serialize, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(values: &[f64], serializer: S) -> Result<S::Ok, S::Error> {
        let values: Vec<Option<f64>> = values.iter().map(|value| value.is_finite().then_some(*value)).collect();
        values.serialize(serializer)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f64>, D::Error> {
        let values: Vec<Option<f64>> = Vec::deserialize(deserializer)?;
        Ok(values.into_iter().map(|value| value.unwrap_or(f64::NAN)).collect())
    }
}
