//! Folds the deltas of a reply into one message.

use serde::Serialize;

use crate::reply::Delta;

/// A whole reply, as a chat client sees it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// `None` where there was no reasoning text.
    pub reasoning: Option<String>,
    /// `None` where the reply is made of calls only.
    pub content: Option<String>,
    pub tool_calls: Vec<Call>,
}

/// A call that the reply makes.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    pub id: String,
    pub name: String,
    /// A JSON object as text; cut where the reply was cut.
    pub arguments: String,
}

/// The call as OpenAI's replies write it.
#[derive(Serialize)]
struct WrittenCall<'a> {
    id: &'a str,
    r#type: &'a str,
    function: WrittenFunction<'a>,
}

#[derive(Serialize)]
struct WrittenFunction<'a> {
    name: &'a str,
    arguments: &'a str,
}

impl Serialize for Call {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let function = WrittenFunction { name: &self.name, arguments: &self.arguments };
        WrittenCall { id: &self.id, r#type: "function", function }.serialize(serializer)
    }
}

impl Message {
    /// Joins the deltas of a reply, however they were cut.
    pub fn fold<'a>(deltas: impl IntoIterator<Item = &'a Delta>) -> Message {
        let mut reasoning = String::new();
        let mut content = String::new();
        let mut tool_calls: Vec<Call> = Vec::new();
        for delta in deltas {
            match delta {
                Delta::Reasoning { text, .. } => reasoning.push_str(text),
                Delta::Content { text, .. } => content.push_str(text),
                Delta::CallStart { id, name, .. } => {
                    tool_calls.push(Call { id: id.clone(), name: name.clone(), arguments: String::new() });
                }
                Delta::CallArguments { index, text } => {
                    if let Some(call) = tool_calls.get_mut(*index) {
                        call.arguments.push_str(text);
                    }
                }
            }
        }
        Message {
            reasoning: Some(reasoning).filter(|text| !text.is_empty()),
            content: if content.is_empty() && !tool_calls.is_empty() { None } else { Some(content) },
            tool_calls,
        }
    }

    /// The fields of an OpenAI message, without `role`: `reasoning_content` and `tool_calls` only where there are any.
    pub fn to_json(&self) -> serde_json::Map<String, serde_json::Value> {
        let mut fields = serde_json::Map::new();
        fields.insert("content".into(), self.content.clone().into());
        if let Some(reasoning) = &self.reasoning {
            fields.insert("reasoning_content".into(), reasoning.clone().into());
        }
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().map(|call| serde_json::json!(call)).collect();
            fields.insert("tool_calls".into(), serde_json::Value::Array(calls));
        }
        fields
    }
}
