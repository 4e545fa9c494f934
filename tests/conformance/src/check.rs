//! Checks of cases, and their messages.

use std::fmt::{Debug, Display};

use device_ipc_core::{DescriptorError, Error, RecoverableError};
use serde::{Deserialize, Serialize};

use crate::outcome::{Outcome, fail};

/// An error of the library for another process: its kind and its text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The variant of [`Error`], as it is written; of [`Error::Refused`], with the kind that the other process has stated.
    pub kind: String,
    /// Its text.
    pub text: String,
}

impl From<&Error> for Refusal {
    fn from(error: &Error) -> Self {
        // The derived Debug form of an enum begins with the name of its variant.
        let debug = format!("{error:?}");
        let kind = debug.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default();
        let kind = match error {
            Error::Refused { kind: stated, .. } => format!("{kind} {stated:?}"),
            _ => kind.to_owned(),
        };
        Self { kind, text: error.to_string() }
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::from(&error)
    }
}

impl From<DescriptorError> for Refusal {
    fn from(error: DescriptorError) -> Self {
        Self::from(Error::from(error))
    }
}

impl<T> From<RecoverableError<T>> for Refusal {
    fn from(error: RecoverableError<T>) -> Self {
        Self::from(error.error())
    }
}

/// Holds where `condition` is true.
///
/// # Errors
///
/// [`Stop::Failed`](crate::Stop::Failed) with `what` was to be.
#[track_caller]
pub fn that(condition: bool, what: impl Display) -> Outcome {
    if condition { Ok(()) } else { fail(what) }
}

/// Holds where the two are equal.
///
/// # Errors
///
/// [`Stop::Failed`](crate::Stop::Failed) with both of them, cut where they are long.
#[track_caller]
pub fn equal<T: PartialEq + Debug>(found: T, expected: T, what: impl Display) -> Outcome {
    if found == expected {
        return Ok(());
    }
    fail(format_args!("{what}:\n      found {}\n   expected {}", cut(&found), cut(&expected)))
}

/// Holds where two long things are equal; says where they begin to differ.
///
/// # Errors
///
/// [`Stop::Failed`](crate::Stop::Failed) with the first difference.
#[track_caller]
pub fn same<T: PartialEq + Debug>(found: &[T], expected: &[T], what: impl Display) -> Outcome {
    // Bytes are compared at once.
    if found == expected {
        return Ok(());
    }
    if found.len() != expected.len() {
        return fail(format_args!("{what}: there are {}, not {}", found.len(), expected.len()));
    }
    let differs = |(one, other): (&T, &T)| one != other;
    match found.iter().zip(expected).position(differs) {
        None => Ok(()),
        Some(at) => fail(format_args!("{what}: number {at} is {:?}, not {:?}", found[at], expected[at])),
    }
}

/// Holds where `result` is an error of this kind whose text has all these parts.
///
/// # Errors
///
/// [`Stop::Failed`](crate::Stop::Failed) with what came instead.
#[track_caller]
pub fn refused<T>(
    result: Result<T, impl Into<Refusal>>,
    what: &str,
    kind: &str,
    phrases: &[&str],
) -> Outcome {
    refused_as_one_of(result, what, &[kind], phrases)
}

/// Holds where `result` is an error of one of these kinds whose text has all these parts.
///
/// # Errors
///
/// [`Stop::Failed`](crate::Stop::Failed) with what came instead.
#[track_caller]
pub fn refused_as_one_of<T>(
    result: Result<T, impl Into<Refusal>>,
    what: &str,
    kinds: &[&str],
    phrases: &[&str],
) -> Outcome {
    let refusal: Refusal = match result {
        Ok(_) => {
            return fail(format_args!("{what} should be refused with {}, and succeeded", kinds.join(" or ")));
        }
        Err(error) => error.into(),
    };
    let Refusal { kind, text } = &refusal;
    if !kinds.contains(&kind.as_str()) {
        return fail(format_args!(
            "{what} should be refused with {}, and got {kind}: {text}",
            kinds.join(" or ")
        ));
    }
    match phrases.iter().find(|phrase| !text.contains(**phrase)) {
        None => Ok(()),
        Some(missing) => fail(format_args!("{what}: the error should say {missing:?}, and says: {text}")),
    }
}

fn cut(value: &impl Debug) -> String {
    const LONGEST: usize = 400;
    let text = format!("{value:?}");
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}… ({} characters)", &text[..end], text.len()),
        None => text,
    }
}
