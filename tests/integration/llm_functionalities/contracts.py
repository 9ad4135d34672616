"""Messages as callers have compiled them, from contracts of their own that know less, or more, than this service's."""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELD = descriptor_pb2.FieldDescriptorProto


def messages(contract: str) -> dict[str, type]:
    """Returns a class for each line of the contract: `Name: field=1 string, other=2 repeated Name`."""
    file = descriptor_pb2.FileDescriptorProto(name="caller.proto", syntax="proto3")
    for line in contract.strip().replace("\\\n", "").splitlines():
        name, _, fields = line.strip().partition(": ")
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            place, *words = text.split()
            field_name, _, number = place.partition("=")
            field = message.field.add(name=field_name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
            if words[0] == "repeated":
                field.label = _FIELD.LABEL_REPEATED
            field.type = {"int32": _FIELD.TYPE_INT32, "string": _FIELD.TYPE_STRING}.get(words[-1], _FIELD.TYPE_MESSAGE)
            if field.type == _FIELD.TYPE_MESSAGE:
                field.type_name = f".{words[-1]}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(message.name))
        for message in file.message_type
    }
