//! Checks the values of request body members.

use super::{Field, Treatment, field_of};
use crate::Route;
use crate::json::{Elements, Members, ids};

/// Number of characters of an invalid id shown in an error.
const SHOWN: usize = 32;
/// Maximum nesting of engine arguments, plus one level.
const MAX_LEVELS: usize = 4;

/// Limits on the members of requests on one route.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    /// The route of the request.
    pub route: Route,
    /// Vocabulary size, which ids must be below; `None` if unknown, in which case ids are not checked.
    pub vocabulary: Option<u32>,
    /// LoRA adapters that requests may name; `None` allows any.
    pub adapters: Option<&'a [String]>,
}

/// The reason for rejecting a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// A member that clients must not send.
    #[error("{0} is not accepted from clients")]
    NotTaken(String),
    /// A token id outside the model's vocabulary.
    #[error("{field}: token id {id} is not in the model's vocabulary of {size} tokens")]
    Id {
        /// The member.
        field: &'static str,
        /// As sent, shortened.
        id: String,
        /// Size of the vocabulary.
        size: u32,
    },
    /// An adapter that is not in `Rules::adapters`.
    #[error("unknown adapter '{0}'")]
    Adapter(String),
    /// The value is neither an adapter name nor a list of names.
    #[error("{0} must be an adapter name or a list of adapter names")]
    AdapterNames(&'static str),
}

impl Rules<'_> {
    /// Checks the JSON value of a member. Anything that only an engine can validate is accepted.
    ///
    /// # Errors
    /// The first [`Fault`] found.
    pub fn check(&self, field: &Field, value: &[u8]) -> Result<(), Fault> {
        self.field(field, value, MAX_LEVELS)
    }

    fn field(&self, field: &Field, value: &[u8], levels: usize) -> Result<(), Fault> {
        match field.treatment {
            Treatment::Removed => Ok(()),
            Treatment::Refused if value == b"null" => Ok(()),
            Treatment::Refused => Err(Fault::NotTaken(field.name.to_owned())),
            Treatment::Adapters => self.adapters(field.name, value),
            Treatment::Arguments => self.arguments(field.name, value, levels),
            Treatment::Ids(form) => {
                let Some(size) = self.vocabulary else { return Ok(()) };
                let Some(id) = ids::outside(value, size, form) else { return Ok(()) };
                let id = String::from_utf8_lossy(id).chars().take(SHOWN).collect();
                Err(Fault::Id { field: field.name, id, size })
            }
        }
    }

    /// Checks an object or a list of objects. Any other value is left to the engine.
    fn arguments(&self, name: &str, value: &[u8], levels: usize) -> Result<(), Fault> {
        if value.first() == Some(&b'[') {
            let elements = Elements::new(value).map_while(Result::ok).map(|element| &value[element]);
            let mut objects = elements.filter(|element| element.first() == Some(&b'{'));
            return objects.try_for_each(|object| self.arguments(name, object, levels));
        }
        for member in Members::new(value).map_while(Result::ok) {
            let field = field_of(&value[member.key.clone()]).filter(|field| field.is_on(self.route));
            match field {
                Some(field) if field.treatment == Treatment::Removed => {
                    return Err(Fault::NotTaken(format!("{name}.{}", field.name)));
                }
                Some(field) if levels > 0 => self.field(field, &value[member.value], levels - 1)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Checks one name, or a list of names that may include nulls.
    fn adapters(&self, field: &'static str, value: &[u8]) -> Result<(), Fault> {
        let Some(known) = self.adapters else { return Ok(()) };
        let check = |value: &[u8]| match serde_json::from_slice::<Option<String>>(value) {
            Ok(Some(name)) if !known.contains(&name) => Err(Fault::Adapter(name)),
            Ok(_) => Ok(()),
            Err(_) => Err(Fault::AdapterNames(field)),
        };
        match value.first() {
            Some(b'[') => Elements::new(value)
                .try_for_each(|element| check(&value[element.map_err(|_| Fault::AdapterNames(field))?])),
            _ => check(value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first fault of a body, found as in the gateway.
    fn fault(route: Route, body: &str) -> Option<String> {
        let adapters = ["sql".to_owned()];
        let rules = Rules { route, vocabulary: Some(100), adapters: Some(&adapters) };
        let members = Members::new(body.as_bytes()).map(Result::unwrap);
        let mut checked = members.filter_map(|member| {
            let field = field_of(&body.as_bytes()[member.key]).filter(|field| field.is_on(route))?;
            rules.check(field, &body.as_bytes()[member.value]).err()
        });
        checked.next().map(|fault| fault.to_string())
    }

    #[test]
    fn faults_are_found_on_their_routes_alone() {
        const ID: &str = "token id 100 is not in the model's vocabulary of 100 tokens";
        for (route, body, expected) in [
            (Route::Completions, r#"{"prompt":[100]}"#, Some(format!("prompt: {ID}"))),
            (Route::Completions, r#"{"prompt":["100"],"input":[100]}"#, None),
            (Route::Chat, r#"{"prompt":[100],"logit_bias":{"100":1}}"#, Some(format!("logit_bias: {ID}"))),
            (Route::Generate, r#"{"sampling_params":{"stop_token_ids":[100]}}"#, Some(format!("stop_token_ids: {ID}"))),
            (
                Route::Generate,
                r#"{"sampling_params":[{},1,{"logit_bias":{"100":1}}]}"#,
                Some(format!("logit_bias: {ID}")),
            ),
            (Route::Generate, r#"{"sampling_params":{"prompt":[100],"n":100}}"#, None),
            (Route::Generate, r#"{"sampling_params":"x","stop_token_ids":null}"#, None),
            (Route::Embeddings, r#"{"embed_override_token_id":100}"#, Some(format!("embed_override_token_id: {ID}"))),
            (Route::Messages, r#"{"stop_token_ids":[100],"system":"x"}"#, None),
            (Route::Extra, r#"{"label_token_ids":[[100]]}"#, Some(format!("label_token_ids: {ID}"))),
            (Route::Extra, r#"{"instances":[{"input_ids":[100]}]}"#, Some(format!("input_ids: {ID}"))),
            (Route::Generate, r#"{"lora_id":"a"}"#, Some("lora_id is not accepted from clients".to_owned())),
            (Route::Generate, r#"{"lora_id":null,"lora_path":null}"#, None),
            (Route::Generate, r#"{"lora_path":"law"}"#, Some("unknown adapter 'law'".to_owned())),
            (Route::Chat, r#"{"lora_path":["sql",null,"l\u0061w"]}"#, Some("unknown adapter 'law'".to_owned())),
            (Route::Completions, r#"{"lora_path":["sql",null]}"#, None),
            (
                Route::Chat,
                r#"{"lora_path":{"a":1}}"#,
                Some("lora_path must be an adapter name or a list of adapter names".to_owned()),
            ),
            (
                Route::Chat,
                r#"{"vllm_xargs":{"a":1,"kv_transfer_p\u0061rams":"x"}}"#,
                Some("vllm_xargs.kv_transfer_params is not accepted from clients".to_owned()),
            ),
            (
                Route::Extra,
                r#"{"sampling_params":{"extra_args":{"ec_transfer_params":{}}}}"#,
                Some("extra_args.ec_transfer_params is not accepted from clients".to_owned()),
            ),
            (
                Route::Extra,
                r#"{"parameters":{"encoder_urls":["http://10.0.0.1"]}}"#,
                Some("parameters.encoder_urls is not accepted from clients".to_owned()),
            ),
        ] {
            assert_eq!(fault(route, body), expected, "{body}");
        }
    }

    /// Each level is traversed once for the one above.
    #[test]
    fn arguments_nest_only_so_deep() {
        let nested = |levels: usize| {
            let (open, close) = (r#"{"extra_args":"#.repeat(levels), "}".repeat(levels));
            fault(Route::Extra, &format!(r#"{open}{{"stop_token_ids":[100]}}{close}"#))
        };
        assert!(nested(4).is_some());
        assert!(nested(6).is_none());
        assert!(nested(500).is_none());
    }

    #[test]
    fn nothing_is_checked_without_rules() {
        let rules = Rules { route: Route::Extra, vocabulary: None, adapters: None };
        for (name, value) in [("input_ids", "[-1]"), ("lora_path", "\"any\"")] {
            assert_eq!(rules.check(field_of(name.as_bytes()).unwrap(), value.as_bytes()), Ok(()));
        }
    }
}
