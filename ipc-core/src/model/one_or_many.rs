//! A list optimised for one element.

use std::ops::{Deref, DerefMut};

use serde::{Serialize, Serializer};

/// One element inline, or a list of any length.
#[derive(Clone, Debug)]
pub(crate) enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    pub(crate) const NONE: Self = Self::Many(Vec::new());

    /// Adds an element. The first one needs no allocation.
    pub(crate) fn push(&mut self, new: T) {
        match std::mem::replace(self, Self::NONE) {
            Self::One(first) => *self = Self::Many(vec![first, new]),
            Self::Many(list) if list.is_empty() => *self = Self::One(new),
            Self::Many(mut list) => {
                list.push(new);
                *self = Self::Many(list);
            }
        }
    }

    /// Consumes each element.
    pub(crate) fn for_each(self, mut consume: impl FnMut(T)) {
        match self {
            Self::One(only) => consume(only),
            Self::Many(list) => list.into_iter().for_each(consume),
        }
    }
}

impl<T> Deref for OneOrMany<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::One(only) => std::slice::from_ref(only),
            Self::Many(list) => list,
        }
    }
}

impl<T> DerefMut for OneOrMany<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::One(only) => std::slice::from_mut(only),
            Self::Many(list) => list,
        }
    }
}

impl<T> FromIterator<T> for OneOrMany<T> {
    fn from_iter<I: IntoIterator<Item = T>>(elements: I) -> Self {
        let mut elements = elements.into_iter();
        match (elements.next(), elements.next()) {
            (None, _) => Self::NONE,
            (Some(only), None) => Self::One(only),
            (Some(first), Some(second)) => Self::Many([first, second].into_iter().chain(elements).collect()),
        }
    }
}

/// Serialised as a list.
impl<T: Serialize> Serialize for OneOrMany<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (**self).serialize(serializer)
    }
}

/// Equal elements are equal, however they are stored.
impl<T: PartialEq> PartialEq for OneOrMany<T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T: Eq> Eq for OneOrMany<T> {}

#[cfg(test)]
mod tests;
