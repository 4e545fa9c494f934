//! Commands in words: `open m DESCRIPTOR timeout=500` is [`Command::Open`](super::Command::Open).
//!
//! The first word names the variant. The next words are its fields in their order; `field=value` sets a field out of order.
//! Flags, numbers, lists, options and enums may be left out: they are false, zero, empty, `None` and their first variant.
//! Times are in ms. `stream:0` is a variant with a value. A list takes all remaining words, or one word with commas.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

use serde::de::value::{Error, MapAccessDeserializer, MapDeserializer, SeqDeserializer};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error as _, IntoDeserializer, MapAccess,
    VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;

/// Parses a command. Returns `None` if the first word names no variant of `T`.
///
/// # Errors
///
/// An error if the other words are not the variant's fields.
pub fn parse<T: DeserializeOwned>(text: &str) -> Result<Option<T>, Error> {
    let mut all = text.split_whitespace();
    let mut words = Words { command: all.next().unwrap_or_default(), ..Words::default() };
    for word in all {
        match word.split_once('=') {
            Some((key, value)) => drop(words.keyed.insert(key, value)),
            None => words.positional.push_back(word),
        }
    }
    match T::deserialize(&mut words) {
        Err(_) if words.unknown => Ok(None),
        result => result.map(Some).map_err(|error| Error::custom(format_args!("{}: {error}", words.command))),
    }
}

#[derive(Default)]
struct Words<'a> {
    command: &'a str,
    /// Whether the variant has been found, so that enums are values of fields.
    started: bool,
    unknown: bool,
    /// The fields that have no value yet.
    names: VecDeque<&'static str>,
    positional: VecDeque<&'a str>,
    keyed: BTreeMap<&'a str, &'a str>,
    /// The value of the current field, if it is out of order.
    value: Option<&'a str>,
}

impl<'a> Words<'a> {
    fn next(&mut self) -> Option<&'a str> {
        self.value.take().or_else(|| self.positional.pop_front())
    }

    fn word(&mut self) -> Result<&'a str, Error> {
        self.next().ok_or_else(|| Error::custom("a word is missing"))
    }

    fn number<T: FromStr<Err: Display> + Default>(&mut self) -> Result<T, Error> {
        let Some(word) = self.next() else { return Ok(T::default()) };
        word.parse().map_err(|error| Error::custom(format_args!("{word:?}: {error}")))
    }

    fn finish(&self) -> Result<(), Error> {
        match self.positional.front().or_else(|| self.keyed.keys().next()) {
            None => Ok(()),
            Some(word) => Err(Error::custom(format_args!("unexpected {word:?}"))),
        }
    }
}

macro_rules! numbers {
    ($($method:ident $visit:ident,)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            visitor.$visit(self.number()?)
        })*
    };
}

impl<'de> Deserializer<'de> for &mut Words<'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_borrowed_str(self.word()?)
    }

    numbers! {
        deserialize_u8 visit_u8, deserialize_u16 visit_u16, deserialize_u32 visit_u32, deserialize_u64 visit_u64,
        deserialize_i32 visit_i32, deserialize_i64 visit_i64, deserialize_f32 visit_f32,
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_bool(self.number::<u8>()? != 0)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if self.value.is_none() && self.positional.is_empty() {
            return visitor.visit_none();
        }
        visitor.visit_some(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let words: Vec<_> = match self.value.take() {
            Some(list) => list.split(',').collect(),
            None => self.positional.drain(..).collect(),
        };
        visitor.visit_seq(SeqDeserializer::new(words.into_iter()))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        if name == "Duration" {
            let time = Duration::from_millis(self.word()?.parse().map_err(Error::custom)?);
            let parts = [time.as_secs(), time.subsec_nanos().into()];
            return visitor.visit_seq(SeqDeserializer::new(parts.into_iter()));
        }
        self.names = names.iter().copied().collect();
        visitor.visit_map(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        if !self.started {
            self.started = true;
            self.unknown = !variants.contains(&self.command);
            return visitor.visit_enum(self);
        }
        let word = self.next().unwrap_or(variants[0]);
        let Some((variant, value)) = word.split_once(':') else {
            return visitor.visit_enum(word.into_deserializer());
        };
        let value: u32 = value.parse().map_err(Error::custom)?;
        let pair = MapDeserializer::new([(variant, value)].into_iter());
        visitor.visit_enum(MapAccessDeserializer::new(pair))
    }

    forward_to_deserialize_any! {
        i8 i16 f64 char str string bytes byte_buf unit unit_struct newtype_struct tuple tuple_struct map identifier ignored_any
    }
}

impl<'de> EnumAccess<'de> for &mut Words<'de> {
    type Error = Error;
    type Variant = Self;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self), Error> {
        Ok((seed.deserialize(self.command.into_deserializer())?, self))
    }
}

impl<'de> VariantAccess<'de> for &mut Words<'de> {
    type Error = Error;

    fn unit_variant(self) -> Result<(), Error> {
        self.finish()
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, Error> {
        seed.deserialize(self)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, _: V) -> Result<V::Value, Error> {
        Err(Error::custom("a command has named fields"))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_struct("", names, visitor)
    }
}

impl<'de> MapAccess<'de> for &mut Words<'de> {
    type Error = Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Error> {
        let Some(name) = self.names.pop_front() else { return self.finish().map(|()| None) };
        self.value = self.keyed.remove(name);
        seed.deserialize(name.into_deserializer()).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Error> {
        seed.deserialize(&mut **self)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Command, Place};
    use super::parse;

    fn command(text: &str) -> Command {
        parse(text).expect("the words are its fields").expect("the first word names a variant")
    }

    #[test]
    fn words_of_command_become_its_fields() {
        let wait = command("wait-now t 7 timeout=1500");
        assert!(
            matches!(&wait, Command::WaitNow { name, value: 7, timeout } if name == "t" && timeout.as_millis() == 1500)
        );
        let drop = command("drop a b c");
        assert!(matches!(&drop, Command::Drop { names } if *names == ["a", "b", "c"]));
        let send = command("send c 5 20000 of=x ready-on=0 drops=1");
        assert!(matches!(
            &send,
            Command::Send { len: 5, of, drops: true, ready_on: Some(0), bytes: None, .. } if *of == ["x"]
        ));
        let open = command("open-received m x place=stream:1");
        assert!(matches!(open, Command::OpenReceived { place: Some(Place::Stream(1)), index: 0, .. }));
    }

    #[test]
    fn words_that_fit_no_field_are_rejected() {
        assert!(parse::<Command>("frobnicate x").expect("no error").is_none());
        for wrong in
            ["free", "free x y", "free x colour=blue", "signal t many", "nothing more", "wait-now t 1"]
        {
            assert!(parse::<Command>(wrong).is_err(), "{wrong}");
        }
    }
}
