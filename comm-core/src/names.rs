//! Enums whose variants have names: on command lines, in files, in messages.

use std::fmt;

use crate::error::Error;

/// Gives an enum without data its names, from one list: `ALL`, `name`, [`Display`](fmt::Display), and
/// [`FromStr`](std::str::FromStr), which fails with [`UnknownName`]. The word in quotes is what one of them is.
///
/// ```
/// #[derive(Clone, Copy, Debug, PartialEq)]
/// enum Shape {
///     Round,
///     Flat,
/// }
///
/// comm_core::names!(Shape, "shape": Round = "round", Flat = "flat");
///
/// assert_eq!(Shape::ALL.map(Shape::name), ["round", "flat"]);
/// assert_eq!("flat".parse(), Ok(Shape::Flat));
/// let error = "oval".parse::<Shape>().unwrap_err();
/// assert_eq!(error.to_string(), "unknown shape 'oval', expected one of round, flat");
/// ```
#[macro_export]
macro_rules! names {
    ($vis:vis $type:ident, $what:literal: $($variant:ident = $name:literal),+ $(,)?) => {
        impl $type {
            /// All of them, in the order in which users see them.
            $vis const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            /// Its name on a command line and in files.
            #[must_use]
            $vis const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }
        }

        impl ::std::fmt::Display for $type {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl ::std::str::FromStr for $type {
            type Err = $crate::UnknownName;

            fn from_str(name: &str) -> ::std::result::Result<Self, Self::Err> {
                match name {
                    $($name => Ok(Self::$variant),)+
                    _ => Err($crate::UnknownName { what: $what, name: name.into(), expected: &[$($name),+] }),
                }
            }
        }
    };
}

/// A text that is the name of none of an enum's variants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownName {
    /// What was to be named.
    pub what: &'static str,
    /// The text.
    pub name: String,
    /// The names that there are.
    pub expected: &'static [&'static str],
}

impl fmt::Display for UnknownName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let UnknownName { what, name, expected } = self;
        write!(f, "unknown {what} '{name}', expected one of {}", expected.join(", "))
    }
}

impl std::error::Error for UnknownName {}

impl From<UnknownName> for Error {
    fn from(unknown: UnknownName) -> Error {
        Error::invalid(unknown.to_string())
    }
}
