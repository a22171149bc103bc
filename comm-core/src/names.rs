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
///
/// Where the names are kept elsewhere, `by` says what gives them: a `const fn` of one variant.
///
/// ```
/// #[derive(Clone, Copy, Debug, PartialEq)]
/// enum Shape {
///     Round,
///     Flat,
/// }
///
/// const fn word(shape: Shape) -> &'static str {
///     match shape {
///         Shape::Round => "round",
///         Shape::Flat => "flat",
///     }
/// }
///
/// comm_core::names!(Shape, "shape" by word: Round, Flat);
///
/// assert_eq!("round".parse(), Ok(Shape::Round));
/// ```
#[macro_export]
macro_rules! names {
    ($vis:vis $type:ident, $what:literal: $($variant:ident = $name:literal),+ $(,)?) => {
        $crate::names!(@ $vis $type, $what, |variant| match variant { $($type::$variant => $name),+ }; $($variant),+);
    };
    ($vis:vis $type:ident, $what:literal by $of:path: $($variant:ident),+ $(,)?) => {
        $crate::names!(@ $vis $type, $what, |variant| $of(variant); $($variant),+);
    };
    (@ $vis:vis $type:ident, $what:literal, |$self:ident| $name:expr; $($variant:ident),+) => {
        // A variant that is missing from the list does not compile.
        const _: fn($type) = |one| match one { $($type::$variant => ()),+ };

        impl $type {
            /// All of them, in the order in which users see them.
            $vis const ALL: [Self; [$(stringify!($variant)),+].len()] = [$(Self::$variant),+];

            /// Its name on a command line and in files.
            #[must_use]
            $vis const fn name(self) -> &'static str {
                let $self = self;
                $name
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
                const NAMES: &[&str] = &[$($type::$variant.name()),+];
                let found = $type::ALL.into_iter().find(|one| one.name() == name);
                found.ok_or_else(|| $crate::UnknownName { what: $what, name: name.into(), expected: NAMES })
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

impl From<UnknownName> for String {
    fn from(unknown: UnknownName) -> String {
        unknown.to_string()
    }
}

impl From<UnknownName> for Error {
    fn from(unknown: UnknownName) -> Error {
        Error::invalid(unknown.to_string())
    }
}
