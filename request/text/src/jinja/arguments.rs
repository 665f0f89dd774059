//! Arguments of calls, filters and tests.

use super::ast::Arguments;
use super::operators::Number;
use super::run::Run;
use super::value::{Map, Text};
use super::{Fallible, Value, refused};

/// Evaluated arguments.
#[derive(Clone, Debug, Default)]
pub(super) struct Given<'v> {
    pub(super) values: Vec<Value<'v>>,
    pub(super) named: Vec<Named<'v>>,
}

#[derive(Clone, Debug)]
pub(super) struct Named<'v> {
    pub(super) name: Text<'v>,
    pub(super) value: Value<'v>,
}

/// The value of a parameter, if it was passed.
#[derive(Debug)]
pub(super) struct Bound<'v>(Option<Value<'v>>);

impl<'v> Bound<'v> {
    /// Returns the value; `None` counts as not passed.
    pub(super) fn given(self) -> Option<Value<'v>> {
        self.0.filter(|value| !matches!(value, Value::None))
    }

    /// Returns the value; `None` counts as a value.
    pub(super) fn any(self) -> Option<Value<'v>> {
        self.0
    }

    pub(super) fn required(self, name: &str) -> Fallible<Value<'v>> {
        self.0.map_or_else(|| refused(format!("argument {name} is missing")), Ok)
    }

    pub(super) fn truth(self, default: bool) -> bool {
        self.0.map_or(default, |value| value.is_true())
    }

    pub(super) fn text(self, default: &'static str) -> Fallible<Text<'v>> {
        match self.0 {
            None => Ok(default.into()),
            Some(Value::Text(text)) => Ok(text),
            Some(other) => refused(format!("expected a string, not {}", other.type_name())),
        }
    }

    pub(super) fn whole(self, default: i128) -> Fallible<i128> {
        self.0.map_or(Ok(default), |value| value.whole("an argument"))
    }
}

impl Value<'_> {
    pub(super) fn whole(&self, what: &str) -> Fallible<i128> {
        match Number::of(self) {
            Some(Number::Int(number)) => Ok(number),
            _ => refused(format!("{what} must be an integer, not {}", self.type_name())),
        }
    }
}

impl<'v> Given<'v> {
    pub(super) fn of(values: Vec<Value<'v>>) -> Self {
        Self { values, named: Vec::new() }
    }

    /// Returns the values of these parameters, passed by position or by name.
    pub(super) fn bind<const N: usize>(self, names: [&str; N]) -> Fallible<[Bound<'v>; N]> {
        if self.values.len() > N {
            return refused(format!("{} arguments were passed, but at most {N} are accepted", self.values.len()));
        }
        let mut bound = names.map(|_| Bound(None));
        for (place, value) in bound.iter_mut().zip(self.values) {
            *place = Bound(Some(value));
        }
        for Named { name, value } in self.named {
            match names.iter().position(|known| *known == &*name) {
                Some(at) if bound[at].0.is_none() => bound[at] = Bound(Some(value)),
                Some(_) => return refused(format!("argument {} is given twice", &*name)),
                None => return refused(format!("unknown argument {}", &*name)),
            }
        }
        Ok(bound)
    }

    pub(super) fn none(self) -> Fallible<()> {
        self.bind([]).map(|[]| ())
    }
}

impl<'v> Run<'v> {
    pub(super) fn arguments(&mut self, arguments: &'v Arguments) -> Fallible<Given<'v>> {
        let mut given = Given::default();
        for value in &arguments.values {
            given.values.push(self.value(value)?);
        }
        for (name, value) in &arguments.named {
            given.named.push(Named { name: (&**name).into(), value: self.value(value)? });
        }
        if let Some(list) = &arguments.list {
            let list = self.value(list)?;
            given.values.extend(self.items(&list)?.iter());
        }
        if let Some(mapping) = &arguments.mapping {
            let mapping = self.value(mapping)?;
            self.named_by(&mapping, &mut given)?;
        }
        Ok(given)
    }

    fn named_by(&mut self, mapping: &Value<'v>, given: &mut Given<'v>) -> Fallible<()> {
        let Value::Map(map) = mapping else {
            return refused(format!("expected a mapping after **, not {}", mapping.type_name()));
        };
        let entries = Map::entries(map);
        self.room_for_items(entries.len())?;
        for entry in entries {
            match entry.key {
                Value::Text(name) => given.named.push(Named { name, value: entry.value }),
                _ => return refused("keywords must be strings"),
            }
        }
        Ok(())
    }
}
